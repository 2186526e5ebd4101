# The gateway as an image. Three stages: the packages it needs; the wheel, with the modules that every request passes compiled
# (COMPILED= makes one of Python alone); what runs: Python, the packages, the wheel and nothing else.
# It runs as nobody in particular, needs no writable file system and listens on 8000 (clients) and 8001 (operators).
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS packages
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/kvgate
COPY pyproject.toml constraints.txt ./
# They change seldom, so a change of the code builds without them.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      print(*p['dependencies'], *p['optional-dependencies']['tracing'], sep='\n')" \
      > requirements.txt \
    && /opt/kvgate/bin/pip install -c constraints.txt -r requirements.txt

FROM packages AS wheel
ARG COMPILED=1
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && /opt/kvgate/bin/pip install -c constraints.txt mypy setuptools
COPY setup.py README.md LICENSE ./
COPY gateway ./gateway
RUN KVGATE_COMPILED=${COMPILED} /opt/kvgate/bin/pip wheel --no-build-isolation --no-deps -w /wheels .

FROM packages AS installed
COPY --from=wheel /wheels /wheels
RUN /opt/kvgate/bin/pip install --no-deps /wheels/*.whl \
    && /opt/kvgate/bin/pip check \
    && /opt/kvgate/bin/python -m compileall -q /opt/kvgate/lib

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="kvgate" \
      org.opencontainers.image.description="Cache-aware, OpenAI-compatible gateway in front of vLLM and SGLang workers" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=installed /opt/kvgate /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# The admin port: it speaks plain HTTP also where the client port speaks TLS, and asks for no token here. With another
# `server.admin_port`, or with `server.admin_tls`, give the container a check of your own.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/health', timeout=2)"]
ENTRYPOINT ["kvgate"]
CMD ["serve", "--config", "/etc/kvgate/kvgate.yaml"]
