// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The tunnel's device. At its egress the table says to which node a packet
 * goes; the headers are pushed here, as for a pod's packet, or by the device. At
 * its ingress they have been stripped, by the device or at the NIC: the sender
 * must be a node, and the packet one of its pods'.
 */
#include "lib/common.h"
#include "lib/drop.h"
#include "lib/encap.h"
#include "lib/enter.h"
#include "lib/fast.h"
#include "lib/fib.h"
#include "lib/parse.h"
#include "lib/remote.h"

/* The link address is what the other end's device answers to. */
inline_fn int aim(struct __sk_buff *skb, const struct remote *r, const struct node_config *n)
{
	struct bpf_tunnel_key key = { .tunnel_id = n->vni, .tunnel_ttl = TUNNEL_TTL };
	bool ipv6 = !addr_is_ipv4(&r->addr);

	if (bpf_skb_store_bytes(skb, 0, r->mac, ETH_ALEN, 0))
		return -1;
	if (ipv6) {
		__builtin_memcpy(key.remote_ipv6, &r->addr, sizeof(key.remote_ipv6));
		__builtin_memcpy(key.local_ipv6, &n->ip6, sizeof(key.local_ipv6));
	} else {
		key.remote_ipv4 = bpf_ntohl(r->addr.words[3]);
		key.local_ipv4 = bpf_ntohl(n->ip4.words[3]);
	}
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), BPF_F_ZERO_CSUM_TX | (ipv6 ? BPF_F_TUNINFO_IPV6 : 0));
}

SEC("tc")
int to_overlay(struct __sk_buff *skb)
{
	struct node_config *n = node_config();
	struct pkt p = {};
	struct remote *r;
	int reason, verdict = NEXT;

	skb->cb[CB_ENDPOINT] = 0; /* no pod's hook */
	p.shape = glance(skb, &p);
	reason = p.shape ? REASON_NONE : parse(skb, &p);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (p.kind == PKT_CONTROL)
		return TC_ACT_SHOT; /* the node's own, to neighbours: on this link it has none */
	r = remote_of(remote_find(&p.t.dst));
	if (!r || !n || !(r->flags & REMOTE_TUNNEL))
		return drop(skb, REASON_NO_REMOTE, DIR_FROM_POD);
	skb->cb[CB_WAY] = 0; /* nothing is kept of the stack's flows */
	if (n->flags & NODE_EBPF && p.shape)
		verdict = into_tunnel(skb, &p, n, r, true);
	if (verdict != NEXT)
		return verdict;
	return aim(skb, r, n) ? drop(skb, REASON_ENCAP, DIR_FROM_POD) : NEXT;
}

/* The node whose tunnel the packet came by, 0 for a stranger's. */
inline_fn __u32 sender(const struct bpf_tunnel_key *key, bool ipv6)
{
	struct addr a;

	if (ipv6)
		__builtin_memcpy(&a, key->remote_ipv6, sizeof(a));
	else
		addr_from_ipv4(&a, bpf_htonl(key->remote_ipv4));
	return tunnel_peer(&a);
}

/* Whether it came to the address that nodes know this one by. At any other the device listens, too, and there a pod that
 * somebody masquerades could reach it. */
inline_fn bool receiver(const struct bpf_tunnel_key *key, const struct node_config *n, bool ipv6)
{
	struct addr a;

	if (!ipv6)
		return bpf_htonl(key->local_ipv4) == n->ip4.words[3];
	__builtin_memcpy(&a, key->local_ipv6, sizeof(a));
	return addr_equal(&a, &n->ip6);
}

/* Reads what the device noted of the outer headers. */
inline_fn bool tunnel_key(struct __sk_buff *skb, struct bpf_tunnel_key *key, bool *ipv6)
{
	*ipv6 = bpf_skb_get_tunnel_key(skb, key, sizeof(*key), 0);
	return !*ipv6 || !bpf_skb_get_tunnel_key(skb, key, sizeof(*key), BPF_F_TUNINFO_IPV6);
}

SEC("tc")
int from_overlay(struct __sk_buff *skb)
{
	struct node_config *n = node_config();
	struct bpf_tunnel_key key = {};
	struct pkt p = {};
	__u32 id, ref;
	int reason;
	bool ipv6;

	skb->cb[CB_ENDPOINT] = 0;
	if (!n)
		return drop(skb, REASON_TUNNEL_PEER, DIR_TO_POD);
	/* Another end that does not know our link address, or the NIC's program, which leaves its own. */
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (n->key && skb->mark == n->key) {
		skb->mark = 0; /* stripped at the NIC, and judged there; or gathered, after it was here (lib/frag.h) */
		return NEXT;
	}
	if (!tunnel_key(skb, &key, &ipv6))
		return drop(skb, REASON_TUNNEL_PEER, DIR_TO_POD);
	ref = sender(&key, ipv6);
	if (!ref || !receiver(&key, n, ipv6))
		return drop(skb, REASON_TUNNEL_PEER, DIR_TO_POD);
	if (key.tunnel_id != n->vni)
		return drop(skb, REASON_TUNNEL_VNI, DIR_TO_POD);
	reason = parse(skb, &p);
	if (reason)
		return drop(skb, reason, DIR_TO_POD);
	if (p.kind == PKT_CONTROL)
		return drop(skb, REASON_TUNNEL_SOURCE, DIR_TO_POD);
	if (remote_find(&p.t.src) != ref)
		return drop(skb, REASON_TUNNEL_SOURCE, DIR_TO_POD);
	id = n->flags & NODE_EBPF ? endpoint_of(&p.t.dst) : 0;
	return id ? enter_pod(skb, id, ref) : NEXT;
}

char __license[] SEC("license") = "Dual BSD/GPL";
