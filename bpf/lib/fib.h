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
#include "way.h"

#define FLOWINFO_MASK 0x0fffffff
#define MAX_IP_LENGTH 65535 /* bytes that the kernel's lookup can be told of */
#define AF_INET 2
#define AF_INET6 10

/* Bytes of the longest IP packet that goes out: of a bundle, one segment. Not what the header says, which a pod may have
 * made shorter than the packet. SCTP's bundle does not say how long its segments are (GSO_BY_FRAGS, 65535): too long for
 * any wire, it is the stack's. */
inline_fn __u32 wire_length(struct __sk_buff *skb, const struct pkt *p)
{
	const struct tcphdr *tcp;
	__u32 header = 8;

	if (likely(!skb->gso_size))
		return skb->len - ETH_HLEN;
	if (p->proto == IPPROTO_TCP) {
		tcp = packet(skb) + (p->l4_off & L4_OFF_MASK);
		if ((void *)(tcp + 1) > packet_end(skb))
			return skb->len - ETH_HLEN; /* never: who read its ports had it there. The stack's, as the above */
		header = tcp->doff * 4;
	}
	return p->l4_off - ETH_HLEN + header + skb->gso_size;
}

/* Whether the routing table would have a packet forwarded. @found: what it answered */
inline_fn bool fib_forwards(long found)
{
	return found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH || found == BPF_FIB_LKUP_RET_FRAG_NEEDED;
}

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
	found = bpf_fib_lookup(skb, fib, sizeof(*fib), 0);
	if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
		return false;
	way->mtu = 0;
	if (found == BPF_FIB_LKUP_RET_SUCCESS) {
		way->mtu = fib->mtu_result;
		__builtin_memcpy(way->macs, fib->dmac, ETH_ALEN);
		__builtin_memcpy(way->macs + ETH_ALEN, fib->smac, ETH_ALEN);
	}
	way->ifindex = fib->ifindex;
	way->next.nh_family = fib->family;
	__builtin_memcpy(way->next.ipv6_nh, fib->ipv6_dst, sizeof(way->next.ipv6_nh)); /* or IPv4's, first */
	return true;
}

/* Out of the device, to the neighbour: the kernel finds its link address. */
inline_fn int way_out(struct __sk_buff *skb, struct way *way)
{
	struct way_kept *kept = way_slot(skb);

	if (kept)
		way_keep(kept, way);
	redirect_note(skb, way->ifindex, REDIRECT_NEIGH);
	return bpf_redirect_neigh(way->ifindex, &way->next, sizeof(way->next), 0);
}

/* Out of the device, to the link address that is known. The tunnel's family may be another than
 * that of the packet inside. */
inline_fn int way_out_again(struct __sk_buff *skb, const struct way_kept *kept, bool ipv6)
{
	struct ethhdr *eth = packet(skb);

	if (unlikely(!link_write(skb, kept->macs) || (void *)(eth + 1) > packet_end(skb)))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	eth->h_proto = ethertype(ipv6);
	redirect_note(skb, kept->ifindex, REDIRECT_NEIGH);
	return bpf_redirect(kept->ifindex, 0);
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
 * Return: whether one was left; nothing has changed otherwise. Inside a pod, which routes nothing, never.
 */
inline_fn bool hop_take(struct __sk_buff *skb, const struct pkt *p)
{
	void *header = packet(skb) + ETH_HLEN;

	if (in_pod)
		return false;
	if (p->ipv6) {
		struct ipv6hdr *ip = header;

		if (unlikely((void *)(ip + 1) > packet_end(skb) || ip->hop_limit <= 1))
			return false;
		ip->hop_limit--;
		bpf_csum_update(skb, (__u16)~bpf_htons(1));
	} else {
		struct iphdr *ip = header;
		__u32 sum;

		if (unlikely((void *)(ip + 1) > packet_end(skb) || ip->ttl <= 1))
			return false;
		sum = ip->check + (__u32)bpf_htons(0x0100); /* RFC 1624 */
		ip->check = sum + (sum >= 0xffff);
		ip->ttl--;
	}
	return true;
}

/* To the node in direct routing. */
slow_fn bool pod_route(struct __sk_buff *skb, const struct pkt *p, __u32 length, struct way *way)
{
	struct bpf_fib_lookup fib = { .tot_len = length };

	if (!p || !way || length > MAX_IP_LENGTH)
		return false;
	fib_flow(skb, &fib, p);
	return fib_route(skb, &fib, way);
}

/* To the other end of the tunnel. */
slow_fn bool tunnel_route(struct __sk_buff *skb, const struct node_config *n, const struct remote *r, __u32 length,
			  struct way *way)
{
	struct bpf_fib_lookup fib = { .l4_protocol = IPPROTO_UDP, .tot_len = length };

	if (!n || !r || !way || length > MAX_IP_LENGTH)
		return false;
	fib_addrs(&fib, tunnel_ipv6(r) ? &n->ip6 : &n->ip4, &r->addr);
	fib.sport = tunnel_port(skb);
	fib.dport = n->port;
	return fib_route(skb, &fib, way);
}

/* Through the tunnel, the way that its flow's packets have just gone or another. @routed: its hop limit has been taken
 * from. Return: a tc verdict; NEXT leaves the packet as it was. */
inline_fn int into_tunnel(struct __sk_buff *skb, const struct pkt *p, const struct node_config *n, const struct remote *r,
			  bool routed)
{
	struct way_kept *kept = way_slot(skb);
	__u32 overhead = tunnel_overhead(r), length = wire_length(skb, p) + overhead;
	bool again = kept && way_holds(kept, length);
	struct way way;
	int pushed;

	if (skb->len + overhead > 65535)
		return NEXT;
	if (!again && (!tunnel_route(skb, n, r, length, &way) || way.ifindex == n->overlay))
		return NEXT;
	if (!routed && !hop_take(skb, p))
		return NEXT;
	pushed = tunnel_push(skb, n, r, p->ipv6);
	if (unlikely(pushed)) /* NEXT: by the device, one hop more or less */
		return pushed;
	return again ? way_out_again(skb, kept, tunnel_ipv6(r)) : way_out(skb, &way);
}

/* Whether a device leads to the outside, and answers are seen there. */
inline_fn bool leads_outside(__u32 ifindex)
{
	struct wear *w = bpf_map_lookup_elem(&mst_wear_v1, &ifindex);

	return w && w->answers;
}

/**
 * to_wire - send a pod's packet to the pod of another node, or to the outside
 * @p: remote is the node, as the packet's flow has it
 *
 * Return: a tc verdict; NEXT leaves the packet, unchanged, to the stack.
 */
global_fn int to_wire(struct __sk_buff *skb, struct pkt *p)
{
	struct node_config *n = node_config();
	struct way_kept *kept;
	struct remote *r;
	struct way way;
	__u32 length;

	if (!p || !n || !(n->flags & NODE_EBPF))
		return NEXT;
	r = remote_of(p->remote);
	if (!r)
		return NEXT;
	if (r->flags & REMOTE_TUNNEL)
		return into_tunnel(skb, p, n, r, false);
	length = wire_length(skb, p);
	kept = way_slot(skb);
	if (kept && way_holds(kept, length))
		return hop_take(skb, p) ? way_out_again(skb, kept, p->ipv6) : NEXT;
	if (!pod_route(skb, p, length, &way) || (r->ref == REMOTE_OUTSIDE && !leads_outside(way.ifindex)) || !hop_take(skb, p))
		return NEXT;
	return way_out(skb, &way);
}

/* Beside the verdicts: what the program itself is to do with the packet, for the stack of calls is too deep
 * where it turns out. */
enum beside_verdicts {
	SEND_OUT = -2,  /* out of the node, by to_wire */
	EDGE_SEND = -3, /* the same at the edge, by edge_send (edge.h) */
	EDGE_HOME = -4, /* to the node's own socket, by edge_home */
	EDGE_INTO = -5, /* into a pod of the node, by that one's program */
	EDGE_DROP = -6, /* dropped, for the reason that it carries */
	EDGE_STUCK = -7, /* masqueraded, and has no way out: by edge_stuck */
	EDGE_TOO_LONG = -8, /* for its way out; its sender is to be told, by edge_too_long */
	EDGE_STRAYS = -9, /* masqueraded, and leads out by another device than it wears the address of: by edge_forget */
};

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

/* Inside a pod never, which the verifier is told: what writes headers where they lie comes after it (common.h). */
inline_fn bool to_send_out(int verdict)
{
	return !in_pod && verdict == SEND_OUT;
}

/* What SEND_OUT stands for. */
inline_fn int sent_out(struct __sk_buff *skb, struct pkt *p, const struct endpoint *self)
{
	int verdict = to_wire(skb, p);

	return verdict == NEXT ? leave(skb, self) : verdict;
}
