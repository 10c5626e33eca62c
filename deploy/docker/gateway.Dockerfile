# The gateway: no tensors, no torch. Build from the repository root:
#   docker build -f deploy/docker/gateway.Dockerfile -t tandem-gateway .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python3 -m venv /opt/tandem
COPY requirements-gateway.lock ./
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps -r requirements-gateway.lock
COPY . .
RUN /opt/tandem/bin/pip install --no-cache-dir --no-deps .

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --create-home tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH PYTHONUNBUFFERED=1 TANDEM_HOST=0.0.0.0 TANDEM_PORT=8000
USER tandem
WORKDIR /home/tandem
EXPOSE 8000 8001
ENTRYPOINT ["python", "-P", "-m", "gateway"]
