/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Entries of the flow tables: under which key they lie, for how long they live,
 * how the half of a flow finds the other, and where a new one goes. What becomes
 * of them as packets pass is in conntrack.h.
 */
#pragma once

#include "common.h"
#include "forget.h"
#include "near.h"
#include "parse.h"

/* A flow as one packet finds it. */
struct flow {
	struct ct_key key;
	struct ct_entry *e; /* NULL: none, or expired */
	__u32 now;
	bool reply;         /* the packet goes against the flow's original direction */
	bool src_is_hi;
};

/**
 * ct_key_of - the key under which both directions of a flow are found
 * Return: true when the tuple's source is the key's `hi` end.
 */
inline_fn bool ct_key_of(struct ct_key *k, const struct tuple *t, __u8 proto, __u8 scope)
{
	bool src_is_hi;

	if (t->src.quads[0] != t->dst.quads[0])
		src_is_hi = t->src.quads[0] > t->dst.quads[0];
	else if (t->src.quads[1] != t->dst.quads[1])
		src_is_hi = t->src.quads[1] > t->dst.quads[1];
	else
		src_is_hi = t->sport > t->dport;

	k->lo = src_is_hi ? t->dst : t->src;
	k->hi = src_is_hi ? t->src : t->dst;
	k->lo_port = src_is_hi ? t->dport : t->sport;
	k->hi_port = src_is_hi ? t->sport : t->dport;
	k->proto = proto;
	k->scope = scope;
	k->pad = 0;
	return src_is_hi;
}

/* Which end of a packet's key its source is, as ct_key_of() has it. */
inline_fn bool key_src_is_hi(const struct ct_key *k, const struct tuple *t)
{
	return !(k->lo_port == t->sport && addr_equal(&k->lo, &t->src));
}

inline_fn bool ct_alive(const struct ct_entry *e, __u32 now)
{
	return e && (__s32)(e->expires - now) >= 0;
}

/* A tuple that has a place in the big table has no other: its flows begin there. One between two pods has
 * at most one living entry, near or there. */
inline_fn struct ct_entry *ct_lookup(const struct ct_key *key, __u32 now)
{
	struct near_place *place = near_place_for(key);
	struct near_flow *n = place ? near_in(place, key) : NULL;
	struct ct_entry *e;

	if (n && ct_alive(&n->e, now))
		return &n->e;
	if (place && !near_others(place, now))
		return NULL;
	e = bpf_map_lookup_elem(&mst_ct_v1, key);
	return e ? e : bpf_map_lookup_elem(&mst_ct_new_v1, key);
}

inline_fn void ct_find_key(struct flow *f)
{
	f->e = ct_lookup(&f->key, f->now);
	if (!ct_alive(f->e, f->now)) {
		f->e = NULL;
		f->reply = false;
		return;
	}
	f->reply = f->src_is_hi ^ (f->e->flags & CT_ORIGIN_IS_HI);
}
_Static_assert(CT_ORIGIN_IS_HI == 1, "ct_find_key takes it for a bool");

/* The flow of a key: where frames are full, or it is rare. */
slow_fn int ct_find_by_key(struct flow *f)
{
	ct_find_key(f);
	return 0;
}

/**
 * ct_find - look up the flow of a packet
 * @f: now must be set; the rest is filled
 * @scope: enum ct_scope
 */
slow_fn int ct_find(struct flow *f, const struct pkt *p, __u8 scope)
{
	f->src_is_hi = ct_key_of(&f->key, &p->t, p->proto, scope);
	ct_find_key(f);
	return 0;
}

/* Whether any flow may be shadowed: only then is it worth looking for one. */
inline_fn bool shadows_exist(__u32 now)
{
	struct facts *known = facts();

	return known && (__s32)(known->shadowed - now) >= 0;
}

inline_fn __u32 ct_lifetime(const struct ct_entry *e, __u8 proto, bool established)
{
	__u8 closing = e->closing_orig | e->closing_reply;

	if (proto == IPPROTO_TCP) {
		if (closing & CT_RST)
			return timeouts.tcp_reset;
		if (closing)
			return timeouts.tcp_closing;
		return established ? timeouts.tcp_established : timeouts.tcp_half_open;
	}
	if (proto == IPPROTO_SCTP && closing)
		return timeouts.tcp_reset;
	if (proto == IPPROTO_UDP || proto == IPPROTO_SCTP)
		return established ? timeouts.udp_established : timeouts.udp_half_open;
	return timeouts.other;
}

/* The packet's tuple in its flow's original direction. */
inline_fn void flow_tuple(struct tuple *t, const struct flow *f, const struct pkt *p)
{
	if (f->reply)
		tuple_reverse(t, &p->t);
	else
		*t = p->t;
}

/* The other half of a translated flow, made from this one. */
inline_fn void ct_other_half(struct ct_entry *half, const struct ct_entry *e, const struct tuple *mine,
			     bool origin_is_hi)
{
	*half = *e;
	half->role = e->role == CT_PRE_NAT ? CT_POST_NAT : CT_PRE_NAT;
	half->flags = (e->flags & ~CT_ORIGIN_IS_HI) | (origin_is_hi ? CT_ORIGIN_IS_HI : 0);
	half->other = *mine;
	half->other.pad = e->other.pad;
}

/* Only a PRE half can be shadowed; what the backend sees is unique by construction. */
inline_fn __u8 other_scope(const struct ct_entry *e)
{
	return e->role == CT_POST_NAT && e->shadow ? CT_SCOPE_SHADOW : CT_SCOPE_FLOW;
}

/* The tuple of an entry, in its flow's original direction. */
global_fn int ct_tuple(struct tuple *t, const struct ct_key *k, const struct ct_entry *e)
{
	bool hi;

	if (!t || !k || !e)
		return 0;
	hi = e->flags & CT_ORIGIN_IS_HI;
	t->src = hi ? k->hi : k->lo;
	t->dst = hi ? k->lo : k->hi;
	t->sport = hi ? k->hi_port : k->lo_port;
	t->dport = hi ? k->lo_port : k->hi_port;
	t->pad = 0;
	return 0;
}

/* Whether @half is the other half of @e, whose own tuple is @mine: a flow that has ended leaves
 * its place to others. */
global_fn int ct_is_half(const struct ct_entry *half, const struct ct_entry *e, const struct tuple *mine)
{
	return half && e && mine && half->role != CT_DIRECT && half->role != e->role &&
	       tuple_equal(&half->other, mine);
}

/**
 * ct_half - find the other half of a translated flow
 * @at: where @e lies
 * @key: filled with the other half's key
 * @mine: filled with @e's own tuple
 *
 * Return: NULL when it is gone or expired, or another flow has its place.
 */
inline_fn struct ct_entry *ct_half(const struct ct_key *at, const struct ct_entry *e, __u32 now,
				   struct ct_key *key, struct tuple *mine)
{
	struct ct_entry *half;

	ct_tuple(mine, at, e);
	ct_key_of(key, &e->other, at->proto, other_scope(e));
	half = ct_lookup(key, now);
	return ct_alive(half, now) && ct_is_half(half, e, mine) ? half : NULL;
}

/* An expiry that says: dead, and somebody is writing a new life over it. */
#define CT_TAKEN(now) ((now) - (1u << 30))

/* Whether an expiry says so. Who writes may have begun in another second: no entry has been dead for as long. */
inline_fn bool ct_taken(__u32 expires, __u32 now)
{
	return expires - CT_TAKEN(now) + 16 < 32;
}

/**
 * ct_revive - write an entry over a dead one, which nobody reads until it lives again
 * @old: what lies at the key, or NULL
 *
 * Return: whether it was dead, and this CPU the one that took it.
 */
inline_fn bool ct_revive(struct ct_entry *old, const struct ct_entry *e, __u32 now)
{
	__u32 expired = old ? old->expires : now;

	if (!old || (__s32)(expired - now) >= 0 || ct_taken(expired, now) ||
	    __sync_val_compare_and_swap(&old->expires, expired, CT_TAKEN(now)) != expired)
		return false;
	__builtin_memcpy(&old->role, &e->role, sizeof(*e) - __builtin_offsetof(struct ct_entry, role));
	barrier();
	old->expires = e->expires;
	return true;
}

/* Look an entry up that was just inserted. A full LRU table gives way first at those that nobody
 * has looked up yet, however new they are: the half that the answer needs would be gone before it. */
inline_fn void ct_referenced(const struct ct_key *key) { bpf_map_lookup_elem(&mst_ct_v1, key); }

inline_fn __s32 *ct_credit(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_credit_v1, &zero);
}

/* An entry that has proved itself vouches for one to come. */
inline_fn void credit_give(void)
{
	__s32 *credit = ct_credit();

	if (credit && *credit < CT_CREDIT)
		__sync_fetch_and_add(credit, 1);
}

inline_fn bool credit_take(void)
{
	__s32 *credit = ct_credit();

	if (!credit || *credit <= 0)
		return false;
	if (__sync_fetch_and_add(credit, -1) > 0)
		return true;
	__sync_fetch_and_add(credit, 1); /* another CPU took the last */
	return false;
}

/* Both ends have closed, or one has reset: nothing more is owed to the flow. */
inline_fn bool ct_closed(const struct ct_entry *e)
{
	return (e->closing_orig | e->closing_reply) & CT_RST || (e->closing_orig && e->closing_reply);
}

/* Whether a closed flow has been silent for less than CT_NEAR_CLOSED. @expires: of its entry */
inline_fn bool ct_just_closed(const struct ct_entry *e, __u32 expires, __u8 proto, __u32 now)
{
	return (__s32)(expires - now) > (__s32)(ct_lifetime(e, proto, true) - CT_NEAR_CLOSED);
}

/* Whether a flow that lies there leaves its room to another. @expires: of its entry */
inline_fn bool near_leaves(const struct near_flow *n, __u32 expires, __u32 now)
{
	if ((__s32)(expires - now) < 0)
		return !ct_taken(expires, now);
	return ct_closed(&n->e) && !ct_just_closed(&n->e, expires, IPPROTO_TCP, now);
}

/* Where a new flow may lie. */
struct near_room {
	struct near_flow *flow; /* that leaves it; NULL: no room */
	__u32 expires;		/* of that one, when it was looked at */
};

inline_fn struct near_room near_room_of(struct near_flow *n, __u32 now)
{
	struct near_room room = { .expires = n->e.expires };

	if (near_leaves(n, room.expires, now))
		room.flow = n;
	return room;
}

/* The room for a new flow at a place. */
inline_fn struct near_room near_room(struct near_place *place, __u32 now)
{
	struct near_room room = near_room_of(&place->flows[0], now);

	return room.flow ? room : near_room_of(&place->flows[1], now);
}

/* The last flow's other half may outlive it, but what the edge keeps of that must not. */
slow_fn int near_forget_half(const struct near_flow *n)
{
	const struct tuple *t = &n->e.other;

	fast_forget_here(t->src.words[3], t->dst.words[3], t->sport, t->dport);
	return 0;
}

/**
 * near_take - take a room, so that nobody else does, and nobody reads it until it lives
 * Return: whether there was one, and nothing has happened to it since it was looked at.
 */
inline_fn bool near_take(const struct near_room *room, __u32 now)
{
	struct near_flow *n = room->flow;

	if (!n || __sync_val_compare_and_swap(&n->e.expires, room->expires, CT_TAKEN(now)) != room->expires)
		return false;
	near_void(n);
	if (n->e.flags & CT_EDGE)
		near_forget_half(n);
	return true;
}

/**
 * near_enter - enter a half-open half at its place
 * @e: complete but for its place
 *
 * Anybody outside can begin flows at the edge: those that take a room that was not theirs do it on credit.
 *
 * Return: whether there was room.
 */
inline_fn bool near_enter(const struct ct_key *key, struct ct_entry *e, __u32 now)
{
	struct near_place *place = near_place_for(key);
	struct near_flow *n = place ? near_of(key) : NULL;
	struct near_room room;

	if (place && !n) {
		n = near_room(place, now).flow;
		if (n && e->flags & CT_EDGE && !credit_take())
			return false;
	}
	if (!n)
		return false;
	room = near_room_of(n, now); /* once more: what is kept of the first look costs stack */
	if (!near_take(&room, now))
		return false;
	n->key = *key;
	e->opening = CT_OPENING_IN_PLACE;
	__builtin_memcpy(&n->e.role, &e->role, sizeof(*e) - __builtin_offsetof(struct ct_entry, role));
	barrier();
	n->e.expires = e->expires;
	return true;
}

/* Enter a half-open half: near where it may lie, else in the place of a dead entry if there is one, or on credit. */
inline_fn long ct_enter(const struct ct_key *key, struct ct_entry *e, __u32 now)
{
	struct ct_entry *old;

	if (e->near) {
		if (near_enter(key, e, now))
			return 0;
		e->near = 0;
	}
	near_elsewhere(key, e, e->expires);
	old = bpf_map_lookup_elem(&mst_ct_v1, key);
	e->opening = CT_OPENING_IN_PLACE;
	if (ct_revive(old, e, now))
		return 0;
	if (!old && key->proto == IPPROTO_TCP && credit_take()) {
		if (!bpf_map_update_elem(&mst_ct_v1, key, e, BPF_NOEXIST)) {
			ct_referenced(key);
			return 0;
		}
		credit_give();
	}
	e->opening = CT_OPENING;
	return bpf_map_update_elem(&mst_ct_new_v1, key, e, BPF_ANY);
}
