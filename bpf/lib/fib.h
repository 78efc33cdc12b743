/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * From a pod to the wire, past the host's stack. The kernel's routing table
 * says where to; whatever is not plain (no route, a packet over the path's MTU,
 * a hop limit that runs out) is left to the stack, which also answers for it.
 */
#pragma once

#include "common.h"
#include "deliver.h"
#include "drop.h"
#include "encap.h"
#include "parse.h"
#include "remote.h"

#define FLOWINFO_MASK 0x0fffffff
#define AF_INET 2
#define AF_INET6 10

/* Bytes of the longest IP packet that goes out: of a bundle, one segment. */
inline_fn __u32 wire_length(struct __sk_buff *skb, const struct pkt *p)
{
	__u32 header = 8;
	__u8 doff;

	if (!skb->gso_size)
		return p->end - ETH_HLEN;
	if (p->proto == IPPROTO_TCP) {
		if (bpf_skb_load_bytes(skb, p->l4_off + 12, &doff, sizeof(doff)))
			return 0;
		header = (doff >> 4) * 4;
	}
	return p->l4_off - ETH_HLEN + header + skb->gso_size;
}

/* Where a packet goes out. */
struct way {
	__u32 ifindex;
	struct bpf_redir_neigh next;
};

/**
 * fib_route - ask the routing table, as for a packet that came in here
 * @fib: filled but for the device
 * @way: set
 *
 * Return: whether the packet may go out that way.
 */
inline_fn bool fib_route(struct __sk_buff *skb, struct bpf_fib_lookup *fib, struct way *way)
{
	long found;

	fib->ifindex = skb->ifindex;
	found = bpf_fib_lookup(skb, fib, sizeof(*fib), has_fib_skip_neigh ? BPF_FIB_LOOKUP_SKIP_NEIGH : 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	way->ifindex = fib->ifindex;
	way->next.nh_family = fib->family;
	__builtin_memcpy(way->next.ipv6_nh, fib->ipv6_dst, sizeof(way->next.ipv6_nh)); /* or IPv4's, first */
	return true;
}

/* Out of the device, to the neighbour: the kernel finds its link address. */
inline_fn int way_out(struct __sk_buff *skb, struct way *way)
{
	redirect_note(skb, way->ifindex, REDIRECT_NEIGH);
	return bpf_redirect_neigh(way->ifindex, &way->next, sizeof(way->next), 0);
}

inline_fn void fib_addrs(struct bpf_fib_lookup *fib, const struct addr *src, const struct addr *dst)
{
	if (addr_is_ipv4(dst)) {
		fib->family = AF_INET;
		fib->ipv4_src = src->words[3];
		fib->ipv4_dst = dst->words[3];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, src, sizeof(fib->ipv6_src));
		__builtin_memcpy(fib->ipv6_dst, dst, sizeof(fib->ipv6_dst));
	}
}

/* What rules and several next hops may go by. */
inline_fn void fib_flow(struct __sk_buff *skb, struct bpf_fib_lookup *fib, const struct pkt *p)
{
	__be32 first = 0;

	fib_addrs(fib, &p->t.src, &p->t.dst);
	fib->l4_protocol = p->proto;
	fib->sport = p->t.sport;
	fib->dport = p->t.dport;
	bpf_skb_load_bytes(skb, ETH_HLEN, &first, sizeof(first));
	if (p->ipv6)
		fib->flowinfo = first & bpf_htonl(FLOWINFO_MASK);
	else
		fib->tos = bpf_ntohl(first) >> 16;
}

/**
 * hop_take - take one from the hop limit, as a router does
 * Return: whether one was left; nothing has changed otherwise.
 */
inline_fn bool hop_take(struct __sk_buff *skb, const struct pkt *p)
{
	if (p->ipv6) {
		__u8 limit;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + 7, &limit, 1) || limit <= 1)
			return false;
		limit--;
		return !bpf_skb_store_bytes(skb, ETH_HLEN + 7, &limit, 1, BPF_F_RECOMPUTE_CSUM);
	} else {
		struct {
			__u8 ttl, proto;
			__sum16 check;
		} h;
		__u32 sum;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + 8, &h, sizeof(h)) || h.ttl <= 1)
			return false;
		h.ttl--;
		sum = h.check + (__u32)bpf_htons(0x0100); /* RFC 1624 */
		h.check = sum + (sum >= 0xffff);
		return !bpf_skb_store_bytes(skb, ETH_HLEN + 8, &h, sizeof(h), 0);
	}
}

/* To the node in direct routing. */
slow_fn bool pod_route(struct __sk_buff *skb, const struct pkt *p, struct way *way)
{
	struct bpf_fib_lookup fib = {};

	if (!p || !way)
		return false;
	fib_flow(skb, &fib, p);
	fib.tot_len = wire_length(skb, p);
	return fib_route(skb, &fib, way);
}

/* To the other end of the tunnel. */
slow_fn bool tunnel_route(struct __sk_buff *skb, const struct pkt *p, const struct tunnel *t, struct way *way)
{
	struct bpf_fib_lookup fib = { .l4_protocol = IPPROTO_UDP };
	__u32 more;

	if (!p || !t || !way)
		return false;
	more = tunnel_overhead(t);
	fib_addrs(&fib, &t->src, &t->dst);
	fib.sport = t->sport;
	fib.dport = t->port;
	fib.tot_len = wire_length(skb, p) + more;
	return skb->len + more <= 65535 && fib_route(skb, &fib, way);
}

inline_fn void tunnel_to(struct tunnel *t, struct __sk_buff *skb, const struct pkt *p, const struct node_config *n,
			 const struct remote *r)
{
	t->vni = n->vni;
	t->port = n->port;
	t->dst = r->addr;
	t->src = addr_is_ipv4(&r->addr) ? n->ip4 : n->ip6;
	t->sport = tunnel_port(skb);
	__builtin_memcpy(t->mac, r->mac, ETH_ALEN);
	t->ipv6 = p->ipv6;
	t->pad = 0;
}

/**
 * to_wire - send a pod's packet to the pod of another node
 * @p: remote is the node, as the packet's flow has it
 *
 * Return: a tc verdict; NEXT leaves the packet, unchanged, to the stack.
 */
global_fn int to_wire(struct __sk_buff *skb, struct pkt *p)
{
	struct node_config *n = node_config();
	struct remote *r;
	struct tunnel t;
	struct way way;

	if (!p || !n || !(n->flags & NODE_EBPF))
		return NEXT;
	r = remote_of(p->remote);
	if (!r)
		return NEXT;
	if (!(r->flags & REMOTE_TUNNEL))
		return pod_route(skb, p, &way) && hop_take(skb, p) ? way_out(skb, &way) : NEXT;
	tunnel_to(&t, skb, p, n, r);
	if (!tunnel_route(skb, p, &t, &way) || way.ifindex == n->overlay || !hop_take(skb, p))
		return NEXT;
	return tunnel_push(skb, &t) ? drop(skb, REASON_ENCAP, DIR_FROM_POD) : way_out(skb, &way);
}

/* Beside the verdicts: the packet is to leave the node, by to_wire. */
#define SEND_OUT -2

/**
 * send_out - a pod's packet leaves the node
 * @ref: of the node that has the destination, 0: the stack carries it
 *
 * Return: a tc verdict, or SEND_OUT: the stack of calls is too deep here.
 */
inline_fn int send_out(struct __sk_buff *skb, struct pkt *p, const struct endpoint *self, __u32 ref)
{
	if (in_pod || !ref)
		return leave(skb, self);
	p->remote = ref;
	return SEND_OUT;
}

/* What SEND_OUT stands for. */
inline_fn int sent_out(struct __sk_buff *skb, struct pkt *p, const struct endpoint *self)
{
	int verdict = to_wire(skb, p);

	return verdict == NEXT ? leave(skb, self) : verdict;
}
