# An image that trains, evaluates and serves; `docs/install.md` says how to build and use it.
#
#   docker build --tag trainer:cpu .
#   docker build --tag trainer:cuda13 --build-arg EXTRAS=cuda13,hub,lerobot,serve .
#
# CUDA's libraries come with jax's wheels: the host needs the NVIDIA driver and its container toolkit alone.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

WORKDIR /opt/openpi_train
COPY LICENSE NOTICE pyproject.toml README.md constraints.txt ./
COPY openpi_train openpi_train
COPY configs configs

ARG EXTRAS=hub,lerobot,serve
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && useradd --create-home --uid 1000 trainer

# enroot, which Slurm's pyxis starts, gives a container the GPUs and CUDA's driver only if its image asks for them. What a
# user has installed in a home directory that is mounted stays outside.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONNOUSERSITE=1

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["python", "-m", "openpi_train"]
CMD ["--help"]
