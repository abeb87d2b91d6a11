# A node on a CPU. Nobody has built this image yet: hadolint alone has read it. First: `make dist`.
#   docker build -t farflock . && docker run -v farflock:/data farflock join INVITE --no-listen
FROM python:3.13-slim-bookworm
WORKDIR /data
COPY constraints.txt dist/*.whl /tmp/farflock/
RUN pip install --no-cache-dir "$(grep '^torch==' /tmp/farflock/constraints.txt)" \
    --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c /tmp/farflock/constraints.txt /tmp/farflock/*.whl \
    && rm -r /tmp/farflock \
    && useradd --uid 10001 flock && chown flock /data
ENV FARFLOCK_HOME=/data
USER 10001
VOLUME /data
ENTRYPOINT ["farflock"]
CMD ["--help"]
