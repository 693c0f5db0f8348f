# unet3d for GPU servers; torch from PyPI brings CUDA, the host only needs its driver.
#   docker build -t unet3d-parallel .
#   docker run --gpus all --shm-size=8g --user $(id -u):$(id -g) -v "$PWD:/data" unet3d-parallel train ...
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

# Triton compiles the launchers of its kernels with a C compiler, on the machine that runs them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Dependencies first: a change of code does not download torch again. The wheels bring their own
# libgomp and libgfortran, so nothing else is installed.
WORKDIR /opt/unet3d
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt

COPY README.md LICENSE ./
COPY unet3d unet3d
RUN pip install --no-deps .
COPY configs configs

# HOME is writable for everybody, so that --user with any number works: caches go there, runs go
# to the mounted folder. USER names the user where the number has none.
ENV HOME=/home/unet3d \
    USER=unet3d \
    MPLCONFIGDIR=/home/unet3d/.config/matplotlib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 1000 --create-home --home-dir /home/unet3d unet3d \
    && python -c "import matplotlib.font_manager" \
    && mkdir -p /data \
    && chown unet3d /data \
    && chmod -R a+rwX /home/unet3d /data
USER unet3d
WORKDIR /data

ENTRYPOINT ["unet3d"]
CMD ["--help"]
