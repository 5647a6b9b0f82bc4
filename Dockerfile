# A container for training on NVIDIA GPUs: docker build -t maxmeg . && docker run --gpus=all maxmeg doctor
# CUDA, cuDNN and NCCL come from JAX's wheels; the host needs the NVIDIA driver only.
FROM python:3.12-slim
WORKDIR /opt/maxmeg
COPY . .
RUN pip install --no-cache-dir '.[cuda13,parquet,s3]'
WORKDIR /work
ENTRYPOINT ["maxmeg"]
CMD ["--help"]
