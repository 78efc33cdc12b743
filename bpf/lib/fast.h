/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The way of a packet whose flow this CPU has just seen: what was decided then
 * lies in a slot that is found by arithmetic, and holds while nothing that the
 * decision rests on has changed. Anything unusual (options, fragments, flags
 * that open, odd lengths) takes the long way, which alone judges, refreshes and
 * drops; one that closes a flow, or may prove one that is half-open, looks at the
 * entry on its way.
 *
 * A slot is this CPU's own, so it needs no lock. What makes it void: its time;
 * either endpoint's generation; the tables' generation, which the engine moves
 * after it rewrote flows; and the flow's, which the programs move whenever an
 * entry of its tuple comes or goes.
 */
#pragma once

#include "common.h"
#include "deliver.h"
#include "drop.h"
#include "fib.h"
#include "forget.h"
#include "nat.h"
#include "parse.h"
#include "remote.h"
#include "way.h"
#include "wire.h"

/* The hook of the node's NICs: one for all pods, because whose a packet is lies in the slot. */
#define FAST_WIRE_HOOK (1u << 31)

/* The hook of an endpoint, in one number. */
inline_fn __u32 fast_hook(__u32 id, __u32 dir)
{
	return from_wire ? FAST_WIRE_HOOK : id << 1 | dir;
}

/* The hook of a device at the edge. */
inline_fn __u32 fast_edge_hook(__u32 ifindex)
{
	return ifindex | 1u << 30;
}

inline_fn __u32 fast_place(__u32 hash, __u32 hook)
{
	return (hash ^ hook * 37) & (FAST_SLOTS - 1);
}

/* The slot of a place that is looked at first, and the other one. */
#define FRONT_SLOT(place) ((place) & (FAST_FRONT - 1))
#define BACK_SLOT(place) ((place) + FAST_FRONT)

inline_fn __u32 tuple_hash(const struct tuple *t)
{
	return fast_hash(t->src.words[3], t->dst.words[3], t->sport, t->dport);
}

/* Ports and flags of a packet whose transport header is at @l4. Return: enum pkt_shape. */
inline_fn __u8 glance_l4(struct __sk_buff *skb, struct pkt *p, void *l4)
{
	struct tcphdr *tcp = l4;
	struct udphdr *udp = l4;

	if (likely(p->proto == IPPROTO_TCP)) {
		if (unlikely((void *)(tcp + 1) > packet_end(skb) || tcp->doff < 5 || p->l4_off + tcp->doff * 4 > p->end))
			return SHAPE_UNKNOWN;
		p->t.sport = tcp->source;
		p->t.dport = tcp->dest;
		p->tcp_flags = ((const __u8 *)tcp)[13];
		if (likely(!(p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST))))
			return SHAPE_USUAL;
		return p->tcp_flags & (TCP_FIN | TCP_RST) ? SHAPE_ENDS : SHAPE_OPENS;
	}
	if (p->proto != IPPROTO_UDP || (void *)(udp + 1) > packet_end(skb) ||
	    bpf_ntohs(udp->len) < sizeof(*udp) || p->l4_off + bpf_ntohs(udp->len) > p->end)
		return SHAPE_UNKNOWN;
	p->t.sport = udp->source;
	p->t.dport = udp->dest;
	return SHAPE_USUAL;
}

inline_fn __u8 glance_ipv4(struct __sk_buff *skb, struct pkt *p, struct iphdr *ip, __u32 length)
{
	__u32 total;

	total = bpf_ntohs(ip->tot_len);
	if (unlikely(*(__u8 *)ip != 0x45 || ip->frag_off & bpf_htons(IP_MORE_FRAGMENTS | IP_OFFSET_MASK) ||
		     total > length - ETH_HLEN || ((__u8 *)&ip->daddr)[0] >= 0xe0))
		return SHAPE_UNKNOWN;
	p->proto = ip->protocol;
	p->l4_off = ETH_HLEN + sizeof(*ip);
	p->end = ETH_HLEN + total;
	addr_from_ipv4(&p->t.src, ip->saddr);
	addr_from_ipv4(&p->t.dst, ip->daddr);
	return glance_l4(skb, p, ip + 1);
}

inline_fn __u8 glance_ipv6(struct __sk_buff *skb, struct pkt *p, struct ipv6hdr *ip, __u32 length)
{
	__u32 payload;

	if (unlikely((void *)(ip + 1) > packet_end(skb)))
		return SHAPE_UNKNOWN;
	payload = bpf_ntohs(ip->payload_len);
	if (unlikely(*(__u8 *)ip >> 4 != 6 || payload > length - ETH_HLEN - sizeof(*ip)))
		return SHAPE_UNKNOWN;
	p->proto = ip->nexthdr;
	p->ipv6 = 1;
	p->l4_off = ETH_HLEN + sizeof(*ip);
	p->end = p->l4_off + payload;
	__builtin_memcpy(&p->t.src, &ip->saddr, 16);
	__builtin_memcpy(&p->t.dst, &ip->daddr, 16);
	if (unlikely(addr_is_ipv4(&p->t.src) || addr_is_ipv4(&p->t.dst) || p->t.dst.bytes[0] == 0xff))
		return SHAPE_UNKNOWN;
	return glance_l4(skb, p, ip + 1);
}

/* As glance(), of the frame at @eth, which is @length bytes long. */
inline_fn __u8 glance_frame(struct __sk_buff *skb, struct pkt *p, struct ethhdr *eth, __u32 length)
{
	struct iphdr *ip = (void *)(eth + 1);
	__be16 proto;

	/* UDP over IPv4 has the shortest headers of all. */
	if (unlikely((void *)(ip + 1) + sizeof(struct udphdr) > packet_end(skb)))
		return SHAPE_UNKNOWN;
	proto = ((__be16 *)eth)[ETH_ALEN]; /* in one piece: the struct is packed */
	if (likely(proto == bpf_htons(ETH_P_IP)))
		return glance_ipv4(skb, p, ip, length);
	if (likely(proto == bpf_htons(ETH_P_IPV6)))
		return glance_ipv6(skb, p, (void *)ip, length);
	return SHAPE_UNKNOWN;
}

/**
 * glance - read a packet of the usual shape, to the same end as parse() and with all its checks
 * @p: filled; must be zeroed, and is fit for parse() whatever the result
 *
 * Return: enum pkt_shape.
 */
inline_fn __u8 glance(struct __sk_buff *skb, struct pkt *p)
{
	return unlikely(skb->vlan_present) ? SHAPE_UNKNOWN : glance_frame(skb, p, packet(skb), skb->len);
}

/**
 * fast_generation - the generations of the tables, of the hook's endpoint, if it has one, and of the flow, mixed
 *
 * Read before the flow's entry is: what changes later makes void what is kept of it.
 */
inline_fn __u32 fast_generation(__u32 hash, const struct endpoint *self)
{
	__u32 key = hash, *flow = bpf_map_lookup_elem(&mst_fast_generations_v1, &key), now;
	struct meta *meta;

	key = 0; /* one place on the stack for both */
	meta = bpf_map_lookup_elem(&mst_meta_v1, &key);
	if (!flow || !meta)
		return 0;
	now = meta->next_generation ^ fast_mix(*flow) ^ (self ? self->generation * 0x85ebca6bu : 0);
	barrier();
	return now;
}

/* Whether a packet is one of the flow at this hook. */
inline_fn bool fast_is(const struct fast_flow *fast, const struct pkt *p, __u32 hook)
{
	return tuple_equal(&fast->t, &p->t) && fast->t.pad == hook && fast->proto == p->proto;
}

/* Whether what was decided about the flow still holds, as far as the flow, this end and the tables go. */
inline_fn bool fast_holds(const struct fast_flow *fast, const struct pkt *p)
{
	return (__s32)(fast->until - now_ticks()) >= 0 && fast->generation == p->generation;
}

/* Whether the endpoint at the other end, or the node that has it, is as it was. @peer: that endpoint */
inline_fn bool fast_peer_current(const struct fast_flow *fast, const struct endpoint *peer)
{
	if (fast->peer)
		return peer && peer->generation == fast->peer_generation;
	return !fast->peer_generation || remote_of(fast->peer_generation);
}

#define FAST_NO (-100) /* no tc verdict: the packet must take the long way */

enum flow_seen {
	FLOW_NONE = 0, /* there is no entry */
	FLOW_KNOWN = 1,
	FLOW_OPENING = 2, /* half-open, still */
};

/* As fast_find(), whether it holds or not. */
inline_fn struct fast_flow *fast_at(const struct pkt *p, __u32 hook, __u32 *slot)
{
	__u32 place = fast_place(*slot, hook);
	struct fast_flow *fast;

	*slot = FRONT_SLOT(place);
	fast = fast_slot(*slot);
	if (!fast)
		return NULL;
	if (!fast_is(fast, p, hook)) {
		/* Behind a flow that has closed lies nothing new, and nothing near. */
		if (fast->flags & FAST_CLOSING)
			return NULL;
		*slot = BACK_SLOT(place);
		fast = fast_slot(*slot);
		if (!fast || !fast_is(fast, p, hook))
			return NULL;
	}
	if (p->shape == SHAPE_ENDS) /* another may take its slot; what acknowledges the end still finds it */
		fast->flags |= FAST_CLOSING;
	return fast;
}

/**
 * fast_find - what is kept of a packet's flow at a hook
 * @p: as glance leaves it
 * @slot: the tuple's hash; becomes where it lies
 *
 * Return: NULL when nothing is, or it holds no more.
 */
inline_fn struct fast_flow *fast_find(const struct pkt *p, __u32 hook, __u32 *slot)
{
	struct fast_flow *fast = fast_at(p, hook, slot);

	return fast && fast_holds(fast, p) ? fast : NULL;
}

/* From now on a slot keeps a way of its owner's, not yet known, and nothing else. */
inline_fn void fast_claim_way(struct fast_flow *fast, const struct tuple *t, __u32 hook, __u8 proto)
{
	fast->t = *t;
	fast->t.pad = hook;
	fast->proto = proto;
	fast->flags = 0;
	fast->until = now_ticks() - 1;
	fast->at.way.mtu = 0;
}

/* Whether packets of that shape may go a way that is kept. */
inline_fn bool fast_shape(const struct pkt *p)
{
	return p->shape && p->shape != SHAPE_OPENS && !(p->tcp_flags & TCP_SYN);
}

/* The flow's entry learns of a packet that closes it or may prove it (conntrack.h). Return: enum flow_seen. */
global_fn int flow_seen(struct pkt *p);

/* Show a packet to its flow's entry, if it must be. Return: whether there is one. */
inline_fn bool fast_seen(struct fast_flow *fast, struct pkt *p)
{
	int seen;

	if (p->shape != SHAPE_ENDS && !(fast->flags & FAST_OPENING))
		return true;
	if (from_edge) /* which has shown it to both halves */
		return true;
	seen = flow_seen(p);
	if (seen == FLOW_KNOWN)
		fast->flags &= ~FAST_OPENING;
	return seen != FLOW_NONE;
}

/**
 * fast_path - let a packet go the way that its flow's packets have just gone
 * @p: as glance leaves it; gets the generations under which something may be kept of its flow
 * @self: whose hook this is
 * @dir: DIR_FROM_POD or DIR_TO_POD
 *
 * Return: a tc verdict, SEND_OUT, EDGE_SEND or FAST_NO.
 */
slow_fn int fast_path(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u32 dir)
{
	__u32 id = skb->cb[CB_ENDPOINT], hook = fast_hook(id, dir), slot;
	struct endpoint *peer;
	struct fast_flow *fast;
	int reason;

	if (dir == DIR_FROM_POD && !in_pod)
		way_slot_note(skb, WAY_NONE);
	if (p->shape == SHAPE_UNKNOWN)
		return FAST_NO;
	slot = tuple_hash(&p->t);
	p->generation = fast_generation(slot, self);
	p->tables = tables_generation();
	if (from_wire || !fast_shape(p)) /* the NIC's own program has looked (wire_fast.h) */
		return FAST_NO;
	fast = fast_find(p, hook, &slot);
	if (!fast)
		return FAST_NO;
	peer = fast->peer ? endpoint_slot(fast->peer) : NULL;
	if (!fast_peer_current(fast, peer))
		return FAST_NO;
	if (!from_mac(skb, fast->mac))
		return FAST_NO;
	if (!in_pod && dir == DIR_TO_POD && fast->at.way.ifindex != skb->ingress_ifindex)
		return FAST_NO; /* which says whether it may be its sender's (beside_tunnel) */
	if (!in_pod && peer && fast->flags & FAST_TRANSLATE && dir == DIR_FROM_POD && unlikely(too_long(skb, peer->mtu)))
		return FAST_NO; /* an answer's sender is to be told (forward_known) */
	if (!fast_seen(fast, p))
		return FAST_NO;

	if (dir == DIR_FROM_POD) {
		p->masqueraded = !in_pod && (fast->flags & FAST_MASQUERADE) == FAST_MASQUERADE;
		if (p->masqueraded && !hop_take(skb, p))
			return FAST_NO;
		count_from_pod(id, skb->len);
	} else {
		count_to_pod(id, skb->len);
	}
	if (fast->flags & FAST_TRANSLATE) {
		reason = translate(skb, p, &fast->to, false);
		if (reason)
			return drop(skb, reason, dir);
	}
	if (dir == DIR_TO_POD)
		return NEXT;
	if (fast->flags & FAST_BY_EDGE) {
		way_slot_note(skb, slot);
		return EDGE_SEND;
	}
	if (peer && fast->flags & FAST_DELIVER)
		return deliver(skb, p, self, peer, fast->peer, &fast->at.vouched);
	if (dir == DIR_FROM_POD && !in_pod)
		way_slot_note(skb, slot);
	return send_out(skb, p, self, fast->peer ? 0 : fast->peer_generation);
}

/* Where a flow is kept at a hook: in front when nobody needs that slot, else in the table. */
inline_fn __u32 fast_choose(const struct pkt *p, __u32 hook)
{
	__u32 place = fast_place(tuple_hash(&p->t), hook);
	struct fast_flow *front = fast_slot(FRONT_SLOT(place));

	if (!front || (!(front->flags & FAST_CLOSING) && (__s32)(front->until - now_ticks()) >= 0 &&
		       !fast_is(front, p, hook)))
		return BACK_SLOT(place);
	return FRONT_SLOT(place);
}

/**
 * fast_keep - keep what was decided about a flow for the packets that follow
 * @p: not yet translated; with the generation that was read before the flow's entry was
 * @peer: the flow's other end
 * @to: what packets are translated to, or NULL
 * @how: enum fast_flag, with that which says which hook it is
 */
global_fn int fast_keep(struct __sk_buff *skb, const struct pkt *p, const struct ct_end *peer, const struct tuple *to,
			__u32 how)
{
	__u32 id = skb->cb[CB_ENDPOINT], dir = how & FAST_TO_POD, slot;
	__u32 hook = how & FAST_AT_EDGE ? fast_edge_hook(skb->ifindex) : fast_hook(id, dir);
	struct ethhdr *eth = packet(skb);
	struct fast_flow *fast;

	if (!p || !peer)
		return 0;
	slot = fast_choose(p, hook);
	fast = fast_slot(slot);
	if (!fast || (void *)(eth + 1) > packet_end(skb) || (from_wire && peer->endpoint))
		return 0;
	if (!fast_is(fast, p, hook) || (to && !tuple_equal(&fast->to, to)))
		fast->at.way.mtu = 0; /* it was another flow's */
	fast->t = p->t;
	fast->t.pad = hook;
	fast->until = now_ticks() + FAST_LIFETIME;
	fast->generation = p->generation;
	fast->peer = from_wire ? id : peer->endpoint;
	/* What came through the host's stack goes back that way, to no node. */
	fast->peer_generation = !peer->endpoint && how & FAST_VIA_STACK ? 0 : peer->generation;
	__builtin_memcpy(fast->mac, eth->h_source, ETH_ALEN);
	fast->proto = p->proto;
	fast->flags = how;
	if (to)
		fast->to = *to;
	if (in_pod)
		fast->at.vouched = 0;
	else if (dir == DIR_FROM_POD)
		way_slot_note(skb, slot);
	else
		fast->at.way.ifindex = skb->ingress_ifindex;
	return 0;
}
