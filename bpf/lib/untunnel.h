/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Taking a packet out of the tunnel as it comes in from the wire. Only what is
 * exactly as another node of ours sends it, and goes to a pod of this node, or
 * to the node itself (then the tunnel's device receives it without its headers);
 * all else is left to that device, whose own hook judges it by name.
 */
#pragma once

#include <linux/ip.h>
#include <linux/ipv6.h>

#include "common.h"
#include "encap.h"
#include "enter.h"
#include "nic.h"
#include "remote.h"
#include "wire_fast.h"

/* linux/bpf.h since 6.3. */
#define ROOM_DECAP_L3_IPV4 (1ULL << 7)
#define ROOM_DECAP_L3_IPV6 (1ULL << 8)

/* The headers of a packet in the tunnel that must be readable: down to the inner addresses. A byte more, and each small
 * packet of TCP would have to be rearranged, for Linux keeps what it carries apart from its headers. */
inline_fn __u32 tunnel_headers(const struct __sk_buff *skb)
{
	return ETH_HLEN + (skb->protocol == bpf_htons(ETH_P_IP) ? sizeof(struct tunnel4) : sizeof(struct tunnel6)) +
	       sizeof(struct ipv6hdr);
}

/* Where the outer headers of a packet in the tunnel end, and whose they are. */
struct outer {
	struct addr src;
	__u32 length; /* bytes before UDP, without the link header */
	bool ipv6;
};

/* Whether UDP to this node follows. The congestion mark that a router set outside is to be carried inside: the kernel's
 * device does. */
inline_fn bool outer_parse4(const struct iphdr *ip, const struct node_config *n, struct outer *o)
{
	if (*(__u8 *)ip != 0x45 || ip->protocol != IPPROTO_UDP || ip->frag_off & bpf_htons(0x3fff) ||
	    ip->daddr != n->ip4.words[3] || (ip->tos & ECN_MASK) == ECN_CE)
		return false;
	addr_from_ipv4(&o->src, ip->saddr);
	o->length = sizeof(*ip);
	o->ipv6 = false;
	return true;
}

inline_fn bool outer_parse6(const struct ipv6hdr *ip, const struct node_config *n, struct outer *o)
{
	struct addr dst;

	__builtin_memcpy(&dst, &ip->daddr, sizeof(dst));
	if (ip->nexthdr != IPPROTO_UDP || !addr_equal(&dst, &n->ip6) || (ip->flow_lbl[0] >> 4 & ECN_MASK) == ECN_CE)
		return false;
	__builtin_memcpy(&o->src, &ip->saddr, sizeof(o->src));
	o->length = sizeof(*ip);
	o->ipv6 = true;
	return true;
}

/* The inner packet's destination; false when it is no IP packet. */
inline_fn bool inner_destination(struct __sk_buff *skb, const void *ip, __be16 proto, struct addr *dst)
{
	const struct ipv6hdr *ip6 = ip;
	const struct iphdr *ip4 = ip;

	if (proto == bpf_htons(ETH_P_IPV6)) {
		if ((void *)(ip6 + 1) > packet_end(skb))
			return false;
		__builtin_memcpy(dst, &ip6->daddr, sizeof(*dst));
		return true;
	}
	if (proto != bpf_htons(ETH_P_IP) || (void *)(ip4 + 1) > packet_end(skb))
		return false;
	addr_from_ipv4(dst, ip4->daddr);
	return true;
}

/* Whether it is our tunnel, as we write it (encap.h), in words as there. */
inline_fn bool plain_tunnel(const struct tunnel_tail *tail, const struct node_config *n)
{
	const void *at = tail;

	return ((const __be16 *)at)[1] == n->port && ((const __u64 *)at)[1] == tunnel_vxlan(n);
}

/* Return: 0, or the verdict on what could not be stripped. */
inline_fn int tunnel_strip(struct __sk_buff *skb, const struct outer *o, __be16 proto)
{
	bool ipv6 = proto == bpf_htons(ETH_P_IPV6);
	__s32 length = o->length + sizeof(struct tunnel_tail);
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;

	if (ipv6 != o->ipv6) /* kernels before 6.3 refuse it */
		flags |= ipv6 ? ROOM_DECAP_L3_IPV6 : ROOM_DECAP_L3_IPV4;
	if (bpf_skb_adjust_room(skb, -length, BPF_ADJ_ROOM_MAC, flags))
		return NEXT;
	if (ipv6 != o->ipv6 && bpf_skb_store_bytes(skb, 2 * ETH_ALEN, &proto, sizeof(proto), 0))
		return drop(skb, REASON_DELIVER, DIR_TO_POD);
	return 0;
}

/* Which pod of this node a packet is for inside. Return: the endpoint, or 0. */
inline_fn __u32 tunnel_endpoint(struct __sk_buff *skb, const struct tunnel_tail *tail)
{
	struct addr inner;
	__u32 id;

	if (!inner_destination(skb, tail + 1, tail->eth.h_proto, &inner))
		return 0;
	id = endpoint_of(&inner);
	return id && behind_host_end(id) ? id : 0;
}

/* Whether a packet is for a socket of the node itself inside, at its address between nodes. Not what the edge may send on:
 * a packet whose headers were taken off here is to the kernel still one in a tunnel, and is pushed into no other. */
inline_fn bool tunnel_home(const struct pkt *p, const struct node_config *n)
{
	return p->shape && (addr_equal(&p->t.dst, &n->ip4) || addr_equal(&p->t.dst, &n->ip6)) && !edge_port(p->t.dport);
}

/* Whether its flow's packets have just gone into a pod, from that very node. */
inline_fn bool tunnel_find(struct __sk_buff *skb, const struct outer *o, struct tunnel_tail *tail, struct pkt *p,
			   struct wire_way *w)
{
	__u32 before = ETH_HLEN + o->length + __builtin_offsetof(struct tunnel_tail, eth);
	struct remote *from;

	p->shape = glance_frame(skb, p, &tail->eth, skb->len - before);
	if (!wire_find(p, w))
		return false;
	from = remote_of(w->ref);
	return from && from->flags & REMOTE_TUNNEL && addr_equal(&from->addr, &o->src);
}

/* Of a flow that nothing is known of, or for the node itself. Return: a tc verdict. */
slow_fn int tunnel_judge(struct __sk_buff *skb, const struct outer *o, const struct tunnel_tail *tail, const struct pkt *p,
			 const struct node_config *n)
{
	__be16 proto = tail->eth.h_proto;
	__u32 ref = tunnel_peer(&o->src), id;
	bool home = tunnel_home(p, n);
	int stripped;

	if (!ref)
		return NEXT;
	id = home ? 0 : tunnel_endpoint(skb, tail);
	if (!id && !home)
		return NEXT;
	stripped = tunnel_strip(skb, o, proto);
	if (stripped)
		return stripped;
	if (!home)
		return enter_pod(skb, id, ref);
	skb->cb[CB_REMOTE] = ref;
	return wire_to_stack(skb, p);
}

/* What is in a plain tunnel to here: @tail is where the outer network header ends. Return: a tc verdict. */
inline_fn int tunnel_take(struct __sk_buff *skb, const struct outer *o, struct tunnel_tail *tail,
			  const struct node_config *n)
{
	struct wire_way w = {};
	struct pkt p = {};
	int verdict;

	if ((void *)(tail + 1) > packet_end(skb) || !plain_tunnel(tail, n))
		return NEXT;
	if (!tunnel_find(skb, o, tail, &p, &w))
		return tunnel_judge(skb, o, tail, &p, n);
	verdict = tunnel_strip(skb, o, ethertype(p.ipv6));
	if (verdict)
		return verdict;
	verdict = wire_go(skb, &p, &w, w.ref);
	return verdict == FAST_NO ? enter_pod(skb, w.id, w.ref) : verdict;
}

/**
 * untunnel - strip the tunnel's headers from a packet to a pod of this node, and hand it on
 * Return: a tc verdict; NEXT leaves the packet as it was, but for headers that were made readable.
 */
slow_fn int untunnel(struct __sk_buff *skb)
{
	struct node_config *n = node_config();
	struct outer o;
	__u32 need;
	void *ip;

	if (!n || !n->overlay)
		return NEXT;
	/* Most drivers leave that much where programs can read it. */
	need = tunnel_headers(skb);
	if (skb->len < need)
		need = skb->len;
	if (packet_end(skb) - packet(skb) < (__s64)need)
		bpf_skb_pull_data(skb, need);
	ip = packet(skb) + ETH_HLEN;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (ip + sizeof(struct iphdr) <= packet_end(skb) && outer_parse4(ip, n, &o))
			return tunnel_take(skb, &o, ip + sizeof(struct iphdr), n);
	} else if (ip + sizeof(struct ipv6hdr) <= packet_end(skb) && outer_parse6(ip, n, &o)) {
		return tunnel_take(skb, &o, ip + sizeof(struct ipv6hdr), n);
	}
	return NEXT;
}
