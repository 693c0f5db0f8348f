# unet3d for GPU servers; torch from PyPI brings CUDA, the host only needs its driver.
#   docker build -t unet3d-parallel .
#   docker run --gpus all --shm-size=8g --user $(id -u):$(id -g) -v "$PWD:/data" unet3d-parallel train ...
#
# The base is python:3.12.14-slim-trixie. For a newer one, look up the digest of its tag with
# `docker buildx imagetools inspect python:TAG`.
ARG BASE_IMAGE=python@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
FROM ${BASE_IMAGE}

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

# Triton compiles the launchers of its kernels with a C compiler, on the machine that runs them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Dependencies come first, so a change of code does not download torch again. The wheels bring their
# own libgomp and libgfortran, so nothing else is installed. The lock is for Python 3.12 on x86-64
# and has the hash of every wheel; another base image gets the same versions without hashes.
WORKDIR /opt/unet3d
COPY pyproject.toml constraints.txt requirements-docker.lock ./
RUN if python -c "import platform, sys; sys.exit((sys.version_info[:2], platform.machine()) != ((3, 12), 'x86_64'))"; \
    then pip install --require-hashes -r requirements-docker.lock; \
    else python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; extras = project['optional-dependencies']; print(*project['dependencies'], *extras['microscopy'], *extras['remote'], *extras['tensorboard'], 'setuptools', sep='\n')" > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt; \
    fi

# Built with the pinned setuptools, without downloading another one.
COPY README.md LICENSE ./
COPY unet3d unet3d
RUN pip install --no-deps --no-build-isolation . && unet3d --version
COPY configs configs

# Only the image's own user may enter its HOME. A user set by --user has no entry in /etc/passwd:
# the entry point gives it a home in /tmp, and USER is its name.
ENV USER=unet3d \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY tools/docker-entrypoint.sh /usr/local/bin/
RUN XDG_CACHE_HOME=/opt/unet3d/cache python -c "import matplotlib.font_manager" \
    && useradd --uid 1000 --create-home --home-dir /home/unet3d unet3d \
    && chmod 0700 /home/unet3d \
    && mkdir -p /data \
    && chown unet3d /data
USER unet3d
WORKDIR /data
RUN docker-entrypoint.sh --version

ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["--help"]
