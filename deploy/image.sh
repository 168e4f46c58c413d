#!/bin/sh
# Builds the image and tries it: deploy/image.sh [--renew] [--push] NAME[:TAG]
#   --renew  take the present digest of the base image into the Dockerfile first
#   --push   push it once it has passed, and print its digest, for image.digest of the chart
# Needs a Docker engine. Nothing of it is left but the image.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
dockerfile=$root/deploy/Dockerfile
renew='' push='' name=''

fail() {
  echo "image.sh: $1" >&2
  exit "${2:-1}"
}

for word; do
  case $word in
    --renew) renew=yes ;;
    --push) push=yes ;;
    -*) fail "no such option: $word" 2 ;;
    *) [ -z "$name" ] || fail "one name, please" 2; name=$word ;;
  esac
done
[ -n "$name" ] || fail "usage: deploy/image.sh [--renew] [--push] NAME[:TAG]" 2
command -v docker >/dev/null || fail "docker is not on PATH"
docker info >/dev/null 2>&1 || fail "no Docker engine answers"

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/ranvier_py/__init__.py")
revision=$(git -C "$root" rev-parse HEAD)
[ -z "$(git -C "$root" status --porcelain)" ] || revision=$revision-dirty
case ${name##*/} in
  *:*) image=$name ;;
  *) image=$name:$version ;;
esac

base=$(sed -n 's/^ARG BASE=//p' "$dockerfile")
if [ -n "$renew" ]; then
  digest=$(docker buildx imagetools inspect "${base%@*}" --format '{{.Manifest.Digest}}')
  case $digest in
    sha256:*) ;;
    *) fail "no digest of ${base%@*}: $digest" ;;
  esac
  base=${base%@*}@$digest
  sed "s|^ARG BASE=.*|ARG BASE=$base|" "$dockerfile" >"$dockerfile.new"
  mv "$dockerfile.new" "$dockerfile"
fi

docker build --file "$dockerfile" --tag "$image" --build-arg "BASE=$base" --build-arg "VERSION=$version" \
  --build-arg "REVISION=$revision" "$root"

label() {
  docker image inspect --format "{{index .Config.Labels \"org.opencontainers.image.$1\"}}" "$image"
}
[ "$(label version)" = "$version" ] || fail "the image has another version"
[ "$(label revision)" = "$revision" ] || fail "the image has another revision"

# A node as it should run, in front of an engine of the lab, in a network of their own.
run=ranvier-smoke-$$
cleanup() {
  docker rm --force "$run-node" "$run-engine" >/dev/null 2>&1 || true
  docker network rm "$run" >/dev/null 2>&1 || true
}
trap cleanup EXIT
trap 'exit 130' INT TERM
docker network create --internal "$run" >/dev/null
docker run --detach --name "$run-engine" --network "$run" --network-alias engine --no-healthcheck \
  --volume "$root/cluster:/lab/cluster:ro" --env PYTHONPATH=/lab --entrypoint /opt/ranvier/bin/python \
  "$image" -m cluster engine --listen 0.0.0.0:8000 >/dev/null
docker run --detach --name "$run-node" --network "$run" --read-only --cap-drop ALL \
  --security-opt no-new-privileges --tmpfs /var/lib/ranvier:uid=65534,gid=65534,mode=0700 \
  "$image" --listen 0.0.0.0:8080 --backend http://engine:8000 >/dev/null

tries=0
until [ "$(docker inspect --format '{{.State.Health.Status}}' "$run-node")" = healthy ]; do
  tries=$((tries + 1))
  if [ "$tries" -gt "${SMOKE_TRIES:-60}" ]; then
    docker logs "$run-node" >&2 || true
    fail "the node is not healthy"
  fi
  sleep "${SMOKE_WAIT_S:-2}"
done
[ "$(docker exec "$run-node" id -u)" = 65534 ] || fail "it runs as another user"
if docker exec "$run-node" touch /written 2>/dev/null; then
  fail "it can write to its root"
fi

docker exec --interactive "$run-node" /opt/ranvier/bin/python - <<'EOF' || fail "the node does not serve"
import json, time, urllib.error, urllib.request

def until_ready(url, deadline):
    while True:
        try:
            return urllib.request.urlopen(url, timeout=3).status
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)

until_ready("http://127.0.0.1:9180/readyz", time.monotonic() + 60)
models = json.load(urllib.request.urlopen("http://127.0.0.1:8080/v1/models", timeout=10))
body = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 8}
request = urllib.request.Request(
    "http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
)
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert answer["choices"][0]["message"]["content"], answer
EOF

echo "built and tried: $image ($revision)"
if [ -n "$push" ]; then
  docker push "$image"
  docker image inspect --format '{{index .RepoDigests 0}}' "$image"
fi
