/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Where TCP flows lie that pods have with each other, on whatever node, and with the outside past the host's stack,
 * and on credit those of clients outside: an array, in which a flow's place is arithmetic on its tuple, and has room for
 * two. An entry there is as any other (conntrack.h), and stays where it is for as long as its flow lives. A flow that
 * finds no room goes to the tables of all flows.
 *
 * What decides is cold code and cold memory: a connection that opens and closes
 * at once pays for each line of either that it touches but once.
 */
#pragma once

#include "common.h"
#include "remote.h"

/* The number of a place: of both directions of a flow the same. Ports that follow one another lie side by side. */
inline_fn __u32 near_number(const struct addr *a, const struct addr *b, __be16 port_a, __be16 port_b)
{
	__u32 mixed = (a->words[3] ^ b->words[3]) * 0x9e3779b1u;

	return (mixed >> 16 ^ bpf_ntohs(port_a ^ port_b)) & (NEAR_PLACES - 1);
}

inline_fn struct near_place *near_place(__u32 number)
{
	return bpf_map_lookup_elem(&mst_ct_near_v1, &number);
}

inline_fn struct near_place *near_place_of(const struct tuple *t)
{
	return near_place(near_number(&t->src, &t->dst, t->sport, t->dport));
}

/* Whether flows under this key may lie here. `mustang why` asks about new flows alone. */
inline_fn struct near_place *near_place_for(const struct ct_key *key)
{
	if (dry_run || key->proto != IPPROTO_TCP || key->scope != CT_SCOPE_FLOW)
		return NULL;
	return near_place(near_number(&key->lo, &key->hi, key->lo_port, key->hi_port));
}

/* Return: 0 when the flow that lies there is the key's. */
inline_fn __u64 near_differs(const struct near_flow *n, const struct ct_key *key)
{
	return (n->key.lo.quads[0] ^ key->lo.quads[0]) | (n->key.lo.quads[1] ^ key->lo.quads[1]) |
	       (n->key.hi.quads[0] ^ key->hi.quads[0]) | (n->key.hi.quads[1] ^ key->hi.quads[1]) |
	       (*(const __u32 *)&n->key.lo_port ^ *(const __u32 *)&key->lo_port);
}

/* Return: 1, 0 for 0. By arithmetic: by a branch each of a place's rooms would be another path to the verifier. */
inline_fn __u64 near_second(__u64 differs)
{
	return (differs | -differs) >> 63;
}

/* The room that the key's flow has or had last at its place; NULL: none. */
inline_fn struct near_flow *near_in(struct near_place *place, const struct ct_key *key)
{
	struct near_flow *n = &place->flows[near_second(near_differs(&place->flows[0], key))];

	return near_differs(n, key) ? NULL : n;
}

inline_fn struct near_flow *near_of(const struct ct_key *key)
{
	struct near_place *place = near_place_for(key);

	return place ? near_in(place, key) : NULL;
}

/* The way into the pod that is one end of a flow without translation, another node's the other. */
inline_fn struct pod_way *near_way_in(struct near_flow *n)
{
	return &((struct near_ways *)&n->e.other)->in;
}

/* The way to the pod that a packet is for, of a flow without translation between two of this node. */
inline_fn struct pod_way *near_way_to(struct near_flow *n, bool reply)
{
	return &((struct near_pods *)&n->e.other)->to[reply];
}

/* Of a flow between two pods on one parent. */
inline_fn struct near_siblings *near_siblings(struct near_flow *n)
{
	return (struct near_siblings *)&n->e.other;
}

inline_fn void near_note_mtu(struct near_flow *n, const struct endpoint *pod)
{
	if (!n->mtu || pod->mtu < n->mtu)
		n->mtu = pod->mtu;
}

inline_fn void near_note_pod(struct near_flow *n, struct pod_way *way, __u32 id)
{
	const struct endpoint *pod = endpoint_slot(id);

	if (!pod)
		return;
	for (int i = 0; i < 3; i++)
		((__u32 *)way->macs)[i] = ((const __u32 *)pod->mac)[i];
	way->ifindex = pod->ifindex;
	near_note_mtu(n, pod);
}

inline_fn void near_note_sibling(struct near_flow *n, int sender, __u32 id)
{
	const struct endpoint *pod = endpoint_slot(id);

	near_siblings(n)->vouched[sender] = 0; /* it speaks of ends as they were */
	if (!pod)
		return;
	__builtin_memcpy(near_siblings(n)->macs[sender], pod->mac, ETH_ALEN);
	near_note_mtu(n, pod);
}

/* What packets ask of both ends is kept with the flow, for each end is two lines of memory more. So the engine moves the
 * tables' generation after it wrote any endpoint or node. */
inline_fn void near_note_ends(struct near_flow *n)
{
	__u32 opener = n->e.opener.endpoint, responder = n->e.responder.endpoint;
	bool direct = n->e.role == CT_DIRECT;
	struct remote *r;

	n->plain = 0;
	n->mtu = 0;
	if (in_pod) {
		if (direct && opener && responder) {
			near_note_sibling(n, 0, opener);
			near_note_sibling(n, 1, responder);
		}
	} else if (!opener || !responder) {
		r = remote_of(opener ? n->e.responder.generation : n->e.opener.generation);
		n->plain = r && !(r->flags & REMOTE_TUNNEL);
		if (direct)
			near_note_pod(n, near_way_in(n), opener | responder);
	} else if (direct) {
		near_note_pod(n, near_way_to(n, false), responder);
		near_note_pod(n, near_way_to(n, true), opener);
	}
}

/* Another number whenever what near_note_ends keeps is another: what programs of the mustang before or after this one
 * have kept, which is something else, does not hold. */
#define NEAR_KEPT 0x6e650001u

/* From now on the flow's packets need not be judged for a while. @tables: read before the flow was. */
inline_fn void near_renew(struct near_flow *n, __u32 tables)
{
	near_note_ends(n);
	n->tables = tables ^ NEAR_KEPT;
	barrier();
	n->until = now_ticks() + FAST_LIFETIME;
}

/* Whether the flow's packets may go its way, as far as the tables go. */
inline_fn bool near_holds(const struct near_flow *n, __u32 tables)
{
	return (__s32)(n->until - now_ticks()) >= 0 && n->tables == (tables ^ NEAR_KEPT);
}

/* Each packet of the flow takes the long way, until one renews it. */
inline_fn void near_void(struct near_flow *n)
{
	n->until = now_ticks() - 1;
}

/* Whether a flow of a place may lie in a table for all flows. */
inline_fn bool near_others(const struct near_place *place, __u32 now)
{
	return (__s32)(place->flows[1].others - now) >= 0;
}

/* Others must not lose what one CPU tells to what another does at the same moment: a flow would be looked for in vain. */
inline_fn void near_tell(__u32 *until, __u32 expires)
{
	for (int i = 0; i < 4; i++) {
		__u32 told = *until;

		if ((__s32)(expires - told) <= 0 || __sync_val_compare_and_swap(until, told, expires) == told)
			return;
	}
}

/**
 * near_elsewhere - a flow lies in a table for all flows until @expires
 *
 * To be told before it does, and whenever it is to live longer: who looks for a flow looks into those tables only where
 * this was told, and for a shadowed one only while there may be any. Who begins a flow near must know of two kinds: of a
 * Service's flow that was given a backend, which another SYN of it must find; and of one to a pod, on whatever node, whose
 * answers a connection of its own with the tuple that the backend sees would take. Both are of flows that a pod of this
 * node opened.
 */
global_fn int near_elsewhere(const struct ct_key *key, const struct ct_entry *e, __u32 expires)
{
	struct near_place *place;
	struct facts *known;

	if (!key || !e || e->near)
		return 0;
	known = key->scope == CT_SCOPE_SHADOW ? facts() : NULL;
	if (known)
		near_tell(&known->shadowed, expires);
	place = near_place_for(key);
	if (!place)
		return 0;
	near_tell(&place->flows[1].others, expires);
	if (e->opener.endpoint &&
	    (e->role == CT_PRE_NAT ? e->opening : e->role == CT_POST_NAT && e->responder.generation))
		near_tell(&place->flows[0].others, expires);
	return 0;
}
