"""A tiny chat model with random weights, its tokenizer and adapters, written without torch: nothing is downloaded.

    python -m tests.real_engine.tiny_model DIRECTORY

A Qwen2 of two layers and some 300 thousand parameters: it answers with noise, and caches, hashes and announces blocks
like any other. The tokenizer is a byte-level BPE trained on the Python standard library's own sources, with the
normalizer and the splitting of Qwen2: loaders of that model type set them whatever the file says.

File formats: safetensors (length of a JSON header as 8 bytes little-endian, the header, the tensors), LoRA as PEFT
writes it.
"""

from __future__ import annotations

import json
import struct
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 4096
HIDDEN = 64
LAYERS = 2
MAX_LENGTH = 4096
_HEADS, _KV_HEADS, _INNER, _RANK = 2, 1, 128, 8
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS_BYTES = 2_000_000

Shape = tuple[int, ...]


def write_model(directory: Path) -> Path:
    """The model and its tokenizer; the directory, for `vllm serve`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    _write_json(directory / "config.json", config)
    head = HIDDEN // _HEADS
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", _HEADS * head), ("k", _KV_HEADS * head), ("v", _KV_HEADS * head)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, _HEADS * head)
        shapes[f"{at}.mlp.gate_proj.weight"] = (_INNER, HIDDEN)
        shapes[f"{at}.mlp.up_proj.weight"] = (_INNER, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, _INNER)
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    _write_tensors(directory / "model.safetensors", shapes, Random(0))
    return directory


def write_adapter(directory: Path, *, seed: int) -> Path:
    """A LoRA adapter of the model, random as well; the directory, for `--lora-modules NAME=DIRECTORY`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    _write_json(directory / "adapter_config.json", config)
    shapes: dict[str, Shape] = {}
    for layer in range(LAYERS):
        for name, rows in (("q", HIDDEN), ("v", HIDDEN // _HEADS * _KV_HEADS)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            shapes[f"{at}.lora_A.weight"] = (_RANK, HIDDEN)
            shapes[f"{at}.lora_B.weight"] = (rows, _RANK)
    _write_tensors(directory / "adapter_model.safetensors", shapes, Random(seed))
    return directory


def _write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "model_max_length": MAX_LENGTH,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _corpus() -> Iterator[str]:
    seen = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        seen += len(text)
        yield text
        if seen > _CORPUS_BYTES:
            return


def _write_tensors(path: Path, shapes: Mapping[str, Shape], random: Random) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in shapes.items():
        begin = len(data)
        count = 1
        for length in shape:
            count *= length
        norm = name.endswith("norm.weight")
        for _ in range(count):
            # A bfloat16 is the upper half of a float.
            data += struct.pack("<f", 1.0 if norm else random.gauss(0.0, 0.02))[2:]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, len(data)]}
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    sys.stdout.write(f"{write_model(Path(sys.argv[1]))}\n")
