/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Flow state. A flow without translation is one entry, found by both
 * directions. A translated one is two: PRE under the tuple the client sees,
 * POST under the tuple the backend sees; each holds the other's tuple in the
 * flow's original direction, so either can restore a lost other half, and
 * translating is rewriting a packet's tuple to the other half's.
 *
 * Half-open flows live in a small table of their own until a packet of the
 * opener follows a reply; then both halves move. Two kinds need not: a flow that
 * ends leaves its entry dead, and the next one on its tuple begins in its place,
 * half-open. It takes no room that was not taken, so a flood gains nothing by it,
 * and a client that uses its ports in turn costs neither table an insertion. And
 * a new TCP flow begins in the big table on the credit of those that have proved
 * themselves before: as many places as that are all a flood can take there.
 */
#pragma once

#include "common.h"
#include "events.h"
#include "fast.h"
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
	struct near_flow *n = near_of(key);
	struct ct_entry *e;

	if (n && ct_alive(&n->e, now))
		return &n->e;
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

/* Whether any flow was ever shadowed: only then is it worth looking for one. */
inline_fn struct facts *facts(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&mst_facts_v1, &zero);
}

inline_fn bool shadows_exist(void)
{
	struct facts *known = facts();

	return known && known->shadowed;
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

/**
 * ct_revive - write an entry over a dead one, which nobody reads until it lives again
 * @old: what lies at the key, or NULL
 *
 * Return: whether it was dead, and this CPU the one that took it.
 */
inline_fn bool ct_revive(struct ct_entry *old, const struct ct_entry *e, __u32 now)
{
	__u32 expired = old ? old->expires : now;

	if (!old || (__s32)(expired - now) >= 0 || expired == CT_TAKEN(now) ||
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

/* Whether a flow that lies there leaves its room to another. @expires: of its entry */
inline_fn bool near_leaves(const struct near_flow *n, __u32 expires, __u32 now)
{
	if ((__s32)(expires - now) < 0)
		return expires != CT_TAKEN(now);
	return ct_closed(&n->e) &&
	       (__s32)(expires - now) <= (__s32)(ct_lifetime(&n->e, IPPROTO_TCP, true) - CT_NEAR_CLOSED);
}

/* The room for a new flow at a place; NULL: none. */
inline_fn struct near_flow *near_room(struct near_place *place, __u32 now)
{
	if (near_leaves(&place->flows[0], place->flows[0].e.expires, now))
		return &place->flows[0];
	return near_leaves(&place->flows[1], place->flows[1].e.expires, now) ? &place->flows[1] : NULL;
}

/**
 * near_take - take a room, so that nobody else does, and nobody reads it until it lives
 * Return: whether it was still free.
 */
inline_fn bool near_take(struct near_flow *n, __u32 now)
{
	__u32 expires = n->e.expires;

	if (!near_leaves(n, expires, now) ||
	    __sync_val_compare_and_swap(&n->e.expires, expires, CT_TAKEN(now)) != expires)
		return false;
	near_void(n);
	return true;
}

/**
 * near_enter - enter a half-open half at its place
 * @e: complete but for its place
 *
 * Return: whether there was room.
 */
inline_fn bool near_enter(const struct ct_key *key, struct ct_entry *e, __u32 now)
{
	struct near_place *place = near_place_for(key);
	struct near_flow *n = place ? near_of(key) : NULL;

	if (place && !n)
		n = near_room(place, now);
	if (!n || !near_take(n, now))
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

/*
 * What follows is about both halves of a flow, each of which may lie in any table: as functions of the
 * verifier's own they are read once, not for each pair of tables.
 */

/**
 * ct_repair - give the other half the same life, or bring it back if it was evicted
 * @at: where @e lies
 */
global_fn int ct_repair(const struct ct_key *at, struct ct_entry *e, __u32 now)
{
	struct ct_entry *other, half;
	struct tuple mine = {};
	struct ct_key key;

	if (!at || !e)
		return 0;
	other = ct_half(at, e, now, &key, &mine);
	if (other) {
		if ((__s32)(e->expires - other->expires) > 0 && !(other->closing_orig | other->closing_reply))
			other->expires = e->expires;
		return 0;
	}
	if (ct_alive(ct_lookup(&key, now), now))
		return 0;
	ct_other_half(&half, e, &mine, ct_key_of(&key, &e->other, key.proto, key.scope));
	if (half.opening)
		return ct_enter(&key, &half, now);
	half.near = 0;
	near_elsewhere(&key, &half, half.expires);
	if (!bpf_map_update_elem(&mst_ct_v1, &key, &half, BPF_ANY))
		ct_referenced(&key);
	return 0;
}

/**
 * ct_close - let the other half know that an end has closed, for it may see no packet of that end
 */
global_fn int ct_close(const struct ct_key *at, struct ct_entry *e, __u32 now)
{
	struct tuple mine = {};
	struct ct_entry *other;
	struct ct_key key;

	if (!at || !e)
		return 0;
	other = ct_half(at, e, now, &key, &mine);
	if (!other)
		return 0;
	other->closing_orig |= e->closing_orig;
	other->closing_reply |= e->closing_reply;
	other->expires = now + ct_lifetime(other, key.proto, true);
	return 0;
}

/**
 * ct_answered - a half-open half becomes an answered one: where it lies, or it moves
 * Return: whether it moved.
 */
global_fn int ct_answered(const struct ct_key *at, struct ct_entry *e, __u32 now)
{
	struct ct_entry copy;
	struct ct_key key;

	if (!at || !e)
		return 0;
	if (at->proto == IPPROTO_TCP)
		credit_give();
	if (e->opening == CT_OPENING_IN_PLACE) {
		e->seen_reply = 1;
		e->expires = now + ct_lifetime(e, at->proto, true);
		e->opening = CT_ANSWERED;
		return 0;
	}
	key = *at; /* on the stack: 6.1 takes no key from a global function's argument */
	copy = *e;
	copy.seen_reply = 1;
	copy.opening = CT_ANSWERED;
	copy.expires = now + ct_lifetime(&copy, key.proto, true);
	near_elsewhere(&key, &copy, copy.expires);
	if (bpf_map_update_elem(&mst_ct_v1, &key, &copy, BPF_ANY))
		return 0;
	bpf_map_delete_elem(&mst_ct_new_v1, &key);
	return 1;
}

/**
 * ct_promote - an answered flow, both halves of it, is one of the established
 * @at: where @e lies
 *
 * Return: whether @e moved.
 */
global_fn int ct_promote(const struct ct_key *at, struct ct_entry *e, __u32 now)
{
	struct ct_entry *other;
	struct ct_key key;

	if (!at || !e)
		return 0;
	if (e->role != CT_DIRECT) {
		ct_key_of(&key, &e->other, at->proto, other_scope(e));
		other = ct_lookup(&key, now);
		if (!ct_alive(other, now) || !(other->seen_reply | e->seen_reply))
			return 0;
		if (other->opening && ct_answered(&key, other, now))
			ct_referenced(&key);
	} else if (!e->seen_reply) {
		return 0;
	}
	return ct_answered(at, e, now);
}

/**
 * event_closed - tell that a flow has closed, by its opener's tuple
 * @k: the key of the entry @e
 */
global_fn int event_closed(const struct ct_key *k, const struct ct_entry *e, __u8 proto, __u8 tcp_flags, __u32 now)
{
	struct event_room *room;
	struct event *v;

	if (!k || !e || !observed(now))
		return 0;
	room = event_room();
	if (!room)
		return 0;
	v = &room->event;
	__builtin_memset(v, 0, sizeof(*v));
	ct_tuple(&v->t, k, e);
	if (e->backend) {
		v->backend = e->backend;
		v->target = e->role == CT_PRE_NAT ? e->other.dst : v->t.dst;
		v->target_port = e->role == CT_PRE_NAT ? e->other.dport : v->t.dport;
	}
	if (e->role == CT_POST_NAT)
		v->t = e->other;
	if (e->backend) {
		v->frontend = v->t.dst;
		v->frontend_port = v->t.dport;
	}
	v->kind = EVENT_CLOSED;
	v->proto = proto;
	v->tcp_flags = tcp_flags;
	v->src_endpoint = e->opener.endpoint;
	v->dst_endpoint = e->responder.endpoint;
	v->endpoint = e->opener.endpoint ? e->opener.endpoint : e->responder.endpoint;
	v->direction = e->opener.endpoint ? DIR_FROM_POD : DIR_TO_POD;
	return event_send(v, now);
}

/* The opener's next packet must be seen: nothing that is kept of the flow holds. */
slow_fn int fast_forget_flow(const struct ct_key *key, const struct ct_entry *e)
{
	fast_forget(key->lo.words[3], key->hi.words[3], key->lo_port, key->hi_port);
	if (e->role != CT_DIRECT)
		fast_forget(e->other.src.words[3], e->other.dst.words[3], e->other.sport, e->other.dport);
	return 0;
}

/* Whether an answered flow needs no more of its opener to live on: it lies where it will stay, and
 * its opener's next packets may all go the short way, past the entry (fast.h). */
inline_fn bool ct_lasts(const struct ct_entry *e, __u8 proto)
{
	return proto == IPPROTO_TCP && e->opening == CT_OPENING_IN_PLACE && e->role == CT_DIRECT && e->seen_reply;
}

/**
 * ct_touch - what a packet of a known flow does to its entry
 */
inline_fn void ct_touch(struct flow *f, struct pkt *p)
{
	struct ct_entry *e = f->e;
	__u32 expires;

	if (p->tcp_flags & (TCP_FIN | TCP_RST)) {
		__u8 how = p->tcp_flags & TCP_RST ? CT_RST : CT_FIN;
		bool closed = ct_closed(e);

		if (f->reply)
			e->closing_reply |= how;
		else
			e->closing_orig |= how;
		if (e->role != CT_DIRECT)
			ct_close(&f->key, e, f->now);
		if (!closed && ct_closed(e))
			event_closed(&f->key, e, p->proto, p->tcp_flags, f->now);
	}
	if (f->reply && !e->seen_reply) {
		e->seen_reply = 1;
		if (e->opening && p->proto == IPPROTO_UDP)
			fast_forget_flow(&f->key, e);
	}
	expires = f->now + ct_lifetime(e, p->proto, !e->opening || ct_lasts(e, p->proto));
	/* Of one that closes it says to the second when: by that its room is left to others (near_leaves). */
	if (p->tcp_flags & (TCP_FIN | TCP_RST) || expires - e->expires + CT_REFRESH - 1 >= 2 * CT_REFRESH - 1) {
		e->expires = expires;
		near_elsewhere(&f->key, e, expires);
		if (e->role != CT_DIRECT)
			ct_repair(&f->key, e, f->now);
	}
	if (e->opening && !f->reply && !(p->tcp_flags & TCP_SYN))
		if (ct_promote(&f->key, e, f->now))
			ct_find_by_key(f);
}

global_fn int flow_seen(struct pkt *p)
{
	struct flow f = { .now = now_seconds() };

	if (!p)
		return FLOW_NONE;
	ct_find(&f, p, CT_SCOPE_FLOW);
	if (!f.e)
		return FLOW_NONE;
	ct_touch(&f, p);
	return f.e && f.e->opening ? FLOW_OPENING : FLOW_KNOWN;
}

/* @n: the entry's room, when it lies near, or NULL. Tuple or key, in either direction: the rest says whose it is. */
inline_fn void ct_end(struct ct_entry *e, struct near_flow *n, __be32 a, __be32 b, __be16 port_a, __be16 port_b, __u32 now)
{
	e->expires = now - 1;
	if (n)
		near_void(n);
	fast_forget(a, b, port_a, port_b);
}

global_fn int ct_end_both(const struct ct_key *at, struct ct_entry *e, __u32 now)
{
	union { /* the stack has no room for both */
		struct ct_key key;
		struct tuple mine;
	} u = {};
	struct ct_entry *half;
	struct near_flow *n;

	if (!at || !e)
		return 0;
	if (e->role != CT_DIRECT) {
		ct_key_of(&u.key, &e->other, at->proto, other_scope(e));
		half = ct_lookup(&u.key, now);
		n = near_of(&u.key);
		ct_tuple(&u.mine, at, e);
		if (ct_alive(half, now) && ct_is_half(half, e, &u.mine))
			ct_end(half, n, e->other.src.words[3], e->other.dst.words[3], e->other.sport, e->other.dport, now);
	}
	ct_end(e, e->near ? near_of(at) : NULL, at->lo.words[3], at->hi.words[3], at->lo_port, at->hi_port, now);
	return 0;
}

/**
 * ct_forget - end a flow, both halves; the entries lie dead where they are
 */
inline_fn void ct_forget(struct flow *f)
{
	if (f->e)
		ct_end_both(&f->key, f->e, f->now);
	f->e = NULL;
}

/**
 * ct_supplanted - whether the place of a closed flow's other half is another flow's by now
 *
 * A half that lies near leaves its room to others, soon after both ends have closed. What is left of
 * the flow must not lead its late packets into the next one.
 */
global_fn int ct_supplanted(const struct ct_key *at, const struct ct_entry *e, __u32 now)
{
	struct tuple mine = {};
	struct ct_entry *half;
	struct ct_key key;

	if (!at || !e)
		return 0;
	ct_tuple(&mine, at, e);
	ct_key_of(&key, &e->other, at->proto, other_scope(e));
	half = ct_lookup(&key, now);
	return ct_alive(half, now) && !ct_is_half(half, e, &mine);
}

/* Find a packet's flow, but what is left of one that has closed. */
inline_fn void ct_find_whole(struct flow *f, const struct pkt *p, __u8 scope)
{
	ct_find(f, p, scope);
	if (f->e && f->e->role != CT_DIRECT && ct_closed(f->e) && ct_supplanted(&f->key, f->e, f->now))
		ct_forget(f);
}

/* A SYN begins a new connection when the old one on its ports has closed (RFC 9293 3.6.1), an INIT a
 * new association. Where the old one only has this tuple by translation, one end may still be sending. */
inline_fn bool ct_reopens(const struct flow *f, const struct pkt *p)
{
	if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	if (f->e->role == CT_POST_NAT && !f->reply)
		return ct_closed(f->e);
	return f->e->closing_orig | f->e->closing_reply;
}

/* A SYN to a backend that is gone must not wait for the half-open entry to expire. The client's
 * half tells: a SYN on the other one's tuple is of another flow. */
slow_fn bool backend_gone(const struct ct_entry *e)
{
	return e->role == CT_PRE_NAT && e->backend && !bpf_map_lookup_elem(&mst_backends_v1, &e->backend);
}

inline_fn bool begins_anew(const struct flow *f, const struct pkt *p)
{
	if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	return ct_reopens(f, p) || backend_gone(f->e);
}

/**
 * ct_create - a new half-open entry
 * @e: complete but for flags' orientation and expiry
 *
 * Return: 0, or a negative errno.
 */
slow_fn int ct_create(const struct tuple *t, __u8 proto, __u8 scope, struct ct_entry *e, __u32 now)
{
	struct ct_key key;

	e->flags = (e->flags & ~CT_ORIGIN_IS_HI) | (ct_key_of(&key, t, proto, scope) ? CT_ORIGIN_IS_HI : 0);
	e->expires = now + ct_lifetime(e, proto, false);
	return ct_enter(&key, e, now);
}

/* Whether a flow occupies the tuple that the backend would see. One that has closed ends,
 * both halves: its late packets must not be taken for the new one's. */
global_fn int tuple_taken(const struct tuple *t, __u8 proto, __u32 now)
{
	struct flow f = { .now = now };

	if (!t)
		return true;
	f.src_is_hi = ct_key_of(&f.key, t, proto, CT_SCOPE_FLOW);
	ct_find_key(&f);
	if (f.e && !ct_closed(f.e))
		return true;
	ct_forget(&f);
	return false;
}
