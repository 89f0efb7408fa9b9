# Runs in the guest of virtual-machine, started by its systemd. Ends with "RESULT: all passed".
set -eu
trap 'code=$?; [ $code = 0 ] || { journalctl -u culvert --no-pager -o cat | tail -n 20; echo "RESULT: failed ($code)"; }' EXIT
step() { echo "== $*"; }
ping_to() { # ping_to ADDRESS COMMAND...: until it answers, for a minute
    address=$1
    shift
    for _ in $(seq 30); do
        "$@" ping -q -c 1 -W 2 "$address" >/dev/null && return 0
        sleep 1
    done
    echo "$address does not answer"
    return 1
}

step "$(uname -r), process 1 is $(cat /proc/1/comm)"
[ "$(cat /proc/1/comm)" = systemd ]
modprobe tun
modprobe wireguard

step 'the package'
dpkg --install /root/culvert.deb >/dev/null
systemctl is-enabled culvert

step 'a second agent behind a veth'
ip netns add far
ip link add near type veth peer name far netns far
ip address add 192.0.2.1/24 dev near
ip link set near up
ip -n far address add 192.0.2.2/24 dev far
ip -n far link set far up
ip -n far link set lo up
culvert init --role exit --tun --advertise 192.0.2.1:4433 >/root/exit
link=$(grep -o 'culvert://[^ ]*' /root/exit | head -n 1)
ip netns exec far culvert init --role entry --tun --peer "$link" --config /root/far/agent.toml >/dev/null
culvert peer add far "$(culvert pubkey /root/far/identity.key)" --allowed-ip 10.9.0.2 >/dev/null

step 'the service'
systemctl start culvert
systemctl is-active culvert
ip netns exec far culvert run --config /root/far/agent.toml >/root/far/log 2>&1 &
ping_to 10.9.0.1 ip netns exec far || { cat /root/far/log; false; }

step 'the watchdog is fed, the sandbox holds'
[ "$(systemctl show --value --property WatchdogUSec culvert)" = 30s ]
grep -q '^Seccomp:[[:space:]]*2' "/proc/$(systemctl show --value --property MainPID culvert)/status"

step 'WireGuard inside the tunnel, and beside it'
for way in inside:10.9.0.1:10.9.0.2:1 beside:192.0.2.1:192.0.2.2:2; do
    IFS=: read -r name near far number <<WAY
$way
WAY
    wg genkey | tee "/root/$name.near" | wg pubkey >"/root/$name.near.pub"
    wg genkey | tee "/root/$name.far" | wg pubkey >"/root/$name.far.pub"
    ip link add "$name" type wireguard
    ip -n far link add "$name" type wireguard
    wg set "$name" listen-port "5182$number" private-key "/root/$name.near" \
        peer "$(cat "/root/$name.far.pub")" allowed-ips 0.0.0.0/0 endpoint "$far:5182$number"
    ip netns exec far wg set "$name" listen-port "5182$number" private-key "/root/$name.far" \
        peer "$(cat "/root/$name.near.pub")" allowed-ips 0.0.0.0/0 endpoint "$near:5182$number"
    ip address add "10.8.$number.1/24" dev "$name"
    ip -n far address add "10.8.$number.2/24" dev "$name"
    ip link set "$name" mtu 1280 up
    ip -n far link set "$name" mtu 1280 up
    ping_to "10.8.$number.1" ip netns exec far
    ip netns exec far ping -q -c 3 -s 1200 -M "do" "10.8.$number.1" | grep -q ' 3 received'
done
ping_to 10.9.0.1 ip netns exec far

step 'an upgrade restarts it, a removal stops it'
before=$(systemctl show --value --property MainPID culvert)
dpkg --install /root/culvert.deb >/dev/null
[ "$(systemctl show --value --property MainPID culvert)" != "$before" ]
ping_to 10.9.0.1 ip netns exec far
dpkg --purge culvert >/dev/null 2>&1
[ ! -e /usr/bin/culvert ] && [ ! -e /etc/culvert ]
echo 'RESULT: all passed'
