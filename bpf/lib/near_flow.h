/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The life of a flow that lies near (near.h): how it begins at once, between two
 * ends that have just been judged, what its packets tell it, and how it closes.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "events.h"
#include "near.h"
#include "nobody.h"
#include "way.h"

inline_fn struct pair *pair_slot(const struct tuple *t, __u32 opener)
{
	__u32 slot = (opener ^ t->dport ^ t->dport >> 8 ^ t->dst.bytes[15]) & (PAIR_SLOTS - 1);

	return bpf_map_lookup_elem(&mst_pairs_v1, &slot);
}

/**
 * pair_of - what was judged of a SYN's pair, if it holds
 * @t: as the responder sees it
 * @id: the opener's endpoint; 0: a pod of another node
 *
 * Whether both ends are what they were, is left to the caller.
 */
inline_fn struct pair *pair_of(const struct tuple *t, __u32 id)
{
	struct pair *pair = pair_slot(t, id);

	if (pair && pair->opener == id && pair->dport == t->dport && addr_equal(&pair->dst, &t->dst) &&
	    addr_equal(&pair->src, &t->src) && pair->generation == nobody_generation() &&
	    (__s32)(pair->until - now_ticks()) >= 0)
		return pair;
	return NULL;
}

/* Return: whether the tuple's flow lies there. @src_is_hi: whether then its source is the key's `hi` end */
inline_fn bool near_is(const struct near_flow *n, const struct tuple *t, bool *src_is_hi)
{
	*src_is_hi = n->key.hi_port == t->sport && n->key.lo_port == t->dport && addr_equal(&n->key.hi, &t->src) &&
		     addr_equal(&n->key.lo, &t->dst);
	return *src_is_hi || (n->key.lo_port == t->sport && n->key.hi_port == t->dport &&
			      addr_equal(&n->key.lo, &t->src) && addr_equal(&n->key.hi, &t->dst));
}

/* The room that the tuple's flow has, or had last, at its place; NULL: none. It has no other. */
inline_fn struct near_flow *near_find(struct near_place *place, const struct tuple *t, bool *src_is_hi)
{
	if (likely(near_is(&place->flows[0], t, src_is_hi)))
		return &place->flows[0];
	return near_is(&place->flows[1], t, src_is_hi) ? &place->flows[1] : NULL;
}

/* The room for a new flow of a tuple at its place, where its last flow leaves that if it has it still. */
inline_fn struct near_room near_room_for(struct near_place *place, const struct tuple *t, __u32 now)
{
	bool hi;
	struct near_flow *own = near_find(place, t, &hi);

	return own ? near_room_of(own, now) : near_room(place, now);
}

/* The same of a flow without translation, whose last one may be closing still: then it ends. The room is taken. */
inline_fn struct near_flow *near_room_again(struct near_place *place, const struct tuple *t, __u32 now)
{
	bool hi;
	struct near_flow *n = near_find(place, t, &hi);
	struct near_room room = n ? near_room_of(n, now) : near_room(place, now);

	if (n && !room.flow && n->e.role == CT_DIRECT && n->e.closing_orig | n->e.closing_reply &&
	    (__s32)(room.expires - now) >= 0)
		room.flow = n;
	return near_take(&room, now) ? room.flow : NULL;
}

/* Whether a living flow lies under the tuple in a table for all flows. */
global_fn int near_lives_elsewhere(const struct tuple *t, __u32 now)
{
	struct ct_key key;

	if (!t)
		return 1;
	ct_key_of(&key, t, IPPROTO_TCP, CT_SCOPE_FLOW);
	return ct_alive(bpf_map_lookup_elem(&mst_ct_v1, &key), now) ||
	       ct_alive(bpf_map_lookup_elem(&mst_ct_new_v1, &key), now);
}

/* The same of what a SYN must know of (near_elsewhere). */
inline_fn bool near_known_elsewhere(const struct near_place *place, const struct tuple *t, __u32 now)
{
	return (__s32)(place->flows[0].others - now) >= 0 && near_lives_elsewhere(t, now);
}

/* Enter a new flow, or a half of one, where room was taken. */
inline_fn void near_begin(struct near_flow *n, const struct tuple *t, const struct pair *pair, __u8 role, __u32 backend)
{
	n->e.flags = ct_key_of(&n->key, t, IPPROTO_TCP, CT_SCOPE_FLOW) ? CT_ORIGIN_IS_HI : 0;
	n->e.role = role;
	n->e.seen_reply = 0;
	n->e.shadow = 0;
	n->e.closing_orig = 0;
	n->e.closing_reply = 0;
	n->e.opening = CT_OPENING_IN_PLACE;
	n->e.near = 1;
	n->e.opener.endpoint = pair->opener;
	n->e.opener.generation = pair->opener_generation;
	n->e.responder.endpoint = pair->responder;
	n->e.responder.generation = pair->responder_generation;
	n->e.backend = backend;
	way_near(n)->mtu = 0;
	barrier();
}

/* Where the way of a pair's last flow is kept, if that was between the same addresses; or NULL. @t: as @key has it, from
 * the opener */
inline_fn struct way_kept *way_of_last(const struct pair *pair, const struct ct_key *key, const struct tuple *t)
{
	struct near_flow *n = way_near_flow(pair->last);
	struct fast_flow *fast;

	if (n)
		return n->e.role == CT_DIRECT && addr_equal(&n->key.lo, &key->lo) && addr_equal(&n->key.hi, &key->hi) ?
			       way_near(n) : NULL;
	fast = pair->last ? fast_slot(pair->last - 1) : NULL;
	return fast && fast->flags & FAST_TRANSLATE && addr_equal(&fast->to.src, &t->src) &&
			       addr_equal(&fast->to.dst, &t->dst) ? &fast->at.way : NULL;
}

/**
 * near_way_of_last - a new flow goes the way of its pair's last one, as long as that holds
 * @kept: where its own is kept
 * @key: of its half that has the pair's addresses
 * @t: that half's tuple
 * @code: of @kept
 */
inline_fn void near_way_of_last(struct way_kept *kept, struct pair *pair, const struct ct_key *key, const struct tuple *t,
				__u32 code)
{
	struct way_kept *last = way_of_last(pair, key, t);

	if (last)
		*kept = *last;
	pair->last = code;
}

/* From here on it is a flow like any other. */
inline_fn void near_live(struct near_flow *n, __u32 now, __u32 tables)
{
	n->e.expires = now + timeouts.tcp_half_open;
	near_renew(n, tables);
}

/**
 * near_enter_pair - begin the flow of a SYN without translation, whose pair holds
 * Return: its way's code; 0: there is no room for it, or it lies elsewhere.
 */
inline_fn __u32 near_enter_pair(const struct tuple *t, struct pair *pair, __u32 now, __u32 tables)
{
	__u32 number = near_number(&t->src, &t->dst, t->sport, t->dport), code;
	struct near_place *place = near_place(number);
	struct near_flow *n;

	if (!place || near_known_elsewhere(place, t, now))
		return 0;
	n = near_room_again(place, t, now);
	if (!n)
		return 0;
	code = way_near_code(number, n != &place->flows[0]);
	near_begin(n, t, pair, CT_DIRECT, BACKEND_NONE);
	if (!pair->opener || !pair->responder)
		near_way_of_last(way_near(n), pair, &n->key, t, code);
	near_live(n, now, tables);
	return code;
}

/* Whether a tuple is that of a packet's flow, in the flow's original direction. */
inline_fn bool near_tuple_is(const struct tuple *t, const struct pkt *p, bool reply)
{
	return reply ? addr_equal(&t->src, &p->t.dst) && addr_equal(&t->dst, &p->t.src) && t->sport == p->t.dport &&
			       t->dport == p->t.sport :
		       tuple_equal(t, &p->t);
}

/* The other half of a Service's flow, if it lies near. @p: of the flow, not translated */
slow_fn struct near_flow *near_half(const struct near_flow *n, const struct pkt *p, bool reply)
{
	const struct tuple *t = &n->e.other;
	struct near_place *place = near_place_of(t);
	bool hi;
	struct near_flow *half = place ? near_find(place, t, &hi) : NULL;

	return half && half->e.role != CT_DIRECT && half->e.role != n->e.role && near_tuple_is(&half->e.other, p, reply) ?
		       half : NULL;
}

inline_fn void near_proved(struct ct_entry *e, __u32 now)
{
	e->seen_reply = 1;
	e->opening = CT_ANSWERED;
	e->expires = now + ct_lifetime(e, IPPROTO_TCP, true);
}

inline_fn void near_closing(struct ct_entry *e, __u8 how, bool reply, __u32 now)
{
	if (reply)
		e->closing_reply |= how;
	else
		e->closing_orig |= how;
	e->expires = now + ct_lifetime(e, IPPROTO_TCP, true);
}

/* An end of a flow closes. */
slow_fn int near_close(struct near_flow *n, struct near_flow *half, const struct pkt *p, bool reply)
{
	__u8 how = p->tcp_flags & TCP_RST ? CT_RST : CT_FIN;
	bool closed = ct_closed(&n->e);
	__u32 now = now_seconds();

	near_closing(&n->e, how, reply, now);
	if (half)
		near_closing(&half->e, how, reply, now);
	if (how == CT_RST) { /* whose number nobody looks at: what comes behind it is to be seen */
		near_void(n);
		if (half)
			near_void(half);
	}
	if (!closed && ct_closed(&n->e) && observed(now))
		event_closed(&n->key, &n->e, IPPROTO_TCP, p->tcp_flags, now);
	return 0;
}

/* The flow learns of a packet that answers, proves or closes it, both halves at once. Return: false when one lies
 * elsewhere, or the packet is none of its own. */
global_fn int near_learn(struct near_flow *n, struct pkt *p, bool reply)
{
	struct near_flow *half = NULL;

	if (!n || !p)
		return false;
	if (p->tcp_flags & TCP_SYN && (!reply || p->shape != SHAPE_OPENS))
		return false;
	if (n->e.role != CT_DIRECT) {
		half = near_half(n, p, reply);
		if (!half)
			return false;
	}
	if (reply && !n->e.seen_reply) {
		n->e.seen_reply = 1;
		if (half)
			half->e.seen_reply = 1;
		else /* lives by its answer, as any without translation that lies where it will stay (ct_lasts) */
			n->e.expires = now_seconds() + ct_lifetime(&n->e, IPPROTO_TCP, true);
	} else if (!reply && n->e.opening && ct_proves(p) && (n->e.seen_reply || (half && half->e.seen_reply))) {
		__u32 now = now_seconds();

		near_proved(&n->e, now);
		if (half)
			near_proved(&half->e, now);
	}
	if (p->shape == SHAPE_ENDS)
		near_close(n, half, p, reply);
	return true;
}

/**
 * near_passes - whether a packet may go its flow's way; what it tells of the flow is noted
 * @n: a flow that holds
 */
inline_fn bool near_passes(struct near_flow *n, struct pkt *p, bool reply)
{
	struct ct_entry *e = &n->e;

	if (likely(p->shape == SHAPE_USUAL && (reply ? e->seen_reply : !e->opening) &&
		   (e->role == CT_DIRECT || !ct_closed(e))))
		return true;
	return near_learn(n, p, reply);
}
