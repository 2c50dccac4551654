# Two images from the tree: docker build --target cpu -t dnnc:cpu .      docker build --target cuda -t dnnc:cuda .
# The CUDA image takes its libraries from wheels; the host needs NVIDIA's driver and container toolkit.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1 DNNC_CACHE_DIR=/cache
COPY --from=wheel /wheels /wheels
RUN useradd --create-home dnnc && mkdir /cache /work && chown dnnc /cache /work
VOLUME /cache
WORKDIR /work

FROM base AS cpu
RUN pip install --no-cache-dir /wheels/dnnc-*.whl && dnnc --version
USER dnnc
ENTRYPOINT ["dnnc"]
CMD ["--help"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir "$(ls /wheels/dnnc-*.whl)[cuda13]" && dnnc --version
USER dnnc
ENTRYPOINT ["dnnc"]
CMD ["--help"]
