# A prefill or decode worker; the command says which. Build from the repository root:
#   docker build -f deploy/docker/worker.Dockerfile -t tandem-worker .
# TORCH and TORCH_INDEX_URL: see README, "Installing torch".
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=cpu
ARG TORCH_INDEX_URL=
WORKDIR /src
# Compiles the native kernels; nothing of it comes into the image.
RUN command -v g++ >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends g++; }
RUN python3 -m venv /opt/tandem
COPY requirements.lock ./
COPY deploy/install_torch.py deploy/
# Torch first and in a layer of its own: it is most of the image and changes least.
RUN PIP_NO_CACHE_DIR=1 /opt/tandem/bin/python deploy/install_torch.py
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps -r requirements.lock
COPY . .
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps .
# For every instruction set: the image runs on other machines than the one that builds it. Not in /src: the installed
# sources are meant.
RUN cd / && /opt/tandem/bin/python -m kernels.native.compiler --all

FROM ${PYTHON_IMAGE}
# The folder is a mount point for the sockets over which workers of one host pass their page memory to each other.
RUN useradd --system --uid 10001 --create-home tandem && install -d -o tandem -m 0700 /run/tandem
COPY --from=build /opt/tandem /opt/tandem
COPY deploy/docker/worker-entrypoint.sh /usr/local/bin/worker-entrypoint
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE \
    TANDEM_HOST=0.0.0.0 TANDEM_METRICS_PORT=8002 TANDEM_SOCKET_DIR=/run/tandem
USER tandem
WORKDIR /home/tandem
EXPOSE 8002
ENTRYPOINT ["worker-entrypoint"]
CMD ["decode_worker"]
