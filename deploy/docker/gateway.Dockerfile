# The gateway: no tensors, no torch. Build from the repository root:
#   docker build -f deploy/docker/gateway.Dockerfile -t tandem-gateway .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
# 0: all of the gateway is interpreted, and the image is built without a compiler.
ARG TANDEM_COMPILE=1
# What compiles, as the base image's distribution names it; a Python of the distribution needs its headers, too.
ARG COMPILER="gcc libc6-dev"
WORKDIR /src
RUN [ "$TANDEM_COMPILE" != 1 ] || { apt-get update -qq && apt-get install -y -qq --no-install-recommends $COMPILER; }
RUN python3 -m venv /opt/tandem && python3 -m venv /opt/compile
COPY requirements-gateway.lock requirements-compile.lock ./
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps -r requirements-gateway.lock
# The compiler of modules reads the types of what they import, so it stands in an environment that has it all.
RUN /opt/compile/bin/pip install --no-cache-dir --no-deps -r requirements-gateway.lock -r requirements-compile.lock
COPY . .
RUN TANDEM_COMPILE=$TANDEM_COMPILE PATH=/opt/compile/bin:$PATH \
    /opt/compile/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/wheels . \
    && /opt/tandem/bin/pip install --no-cache-dir --no-deps /opt/wheels/*.whl

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --create-home tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 TANDEM_HOST=0.0.0.0 TANDEM_PORT=8000
USER tandem
WORKDIR /home/tandem
EXPOSE 8000 8001
ENTRYPOINT ["python", "-P", "-m", "gateway"]
