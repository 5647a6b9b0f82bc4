# A container for NVIDIA GPUs: docker build -t maxmeg . && docker run --gpus=all maxmeg doctor
# CUDA, cuDNN and NCCL come from JAX's wheels; the host needs the NVIDIA driver only. docs/clouds.md.
FROM python:3.12-slim
# NCCL loads libibverbs to use InfiniBand; without it, it uses TCP.
RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers \
    && rm -rf /var/lib/apt/lists/*
# enroot (Slurm's pyxis) gives no GPUs to an image without these variables.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/maxmeg
COPY . .
RUN pip install --no-cache-dir '.[cuda13,parquet,s3,serve]'
WORKDIR /work
ENTRYPOINT ["maxmeg"]
CMD ["--help"]
