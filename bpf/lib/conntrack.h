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
 *
 * Here is how a flow lives, both halves of it, each of which may lie in any table:
 * so most of this are functions of the verifier's own, which are read once, not
 * for each pair of tables. The entries themselves are in ct_entry.h.
 */
#pragma once

#include "common.h"
#include "ct_entry.h"
#include "events.h"
#include "fast.h"
#include "parse.h"

/**
 * ct_repair - give the other half the same life, or bring it back if it was evicted
 * @at: where @e lies
 *
 * Return: 0; 1 when another flow has its place by now, whose packets this one's would be taken for.
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
		if ((__s32)(e->expires - other->expires) > 0 && !(other->closing_orig | other->closing_reply)) {
			near_elsewhere(&key, other, e->expires);
			other->expires = e->expires;
		}
		return 0;
	}
	if (ct_alive(ct_lookup(&key, now), now))
		return 1;
	ct_other_half(&half, e, &mine, ct_key_of(&key, &e->other, key.proto, key.scope));
	if (half.opening) {
		ct_enter(&key, &half, now);
		return 0;
	}
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
	near_elsewhere(&key, other, now + ct_lifetime(other, key.proto, true));
	other->expires = now + ct_lifetime(other, key.proto, true);
	return 0;
}

/**
 * ct_answered - a half-open half becomes an answered one: where it lies, or it moves
 *
 * That it lives longer, its caller has told (near_elsewhere).
 *
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
		near_elsewhere(&key, other, now + ct_lifetime(other, at->proto, true));
		if (other->opening && ct_answered(&key, other, now))
			ct_referenced(&key);
	} else if (!e->seen_reply) {
		return 0;
	}
	near_elsewhere(at, e, now + ct_lifetime(e, at->proto, true));
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
		n = half && half->near ? near_of(&u.key) : NULL;
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

/* Whether a packet proves that its flow's opener has heard an answer. Of TCP an acknowledgement alone: what has none is
 * dropped by the other end without a word, so that anybody might send it under addresses that are not his. */
inline_fn bool ct_proves(const struct pkt *p)
{
	return p->proto == IPPROTO_TCP ? (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_ACK : !(p->tcp_flags & TCP_SYN);
}

/**
 * ct_touch - what a packet of a known flow does to its entry
 *
 * There is none any more behind it when another flow had taken its other half's place.
 */
inline_fn void ct_touch(struct flow *f, struct pkt *p)
{
	struct ct_entry *e = f->e;
	__u32 expires, slack;

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
	slack = e->closing_orig | e->closing_reply ? 0 : CT_REFRESH - 1;
	/* Of one that closes, or goes on after a RST that was not its own, it says to the second when: by that its room is
	 * left to others (near_leaves). */
	if (e->opener.endpoint != CT_END_CUT && /* which lives as long as policy said (judge_again) */
	    expires - e->expires + slack >= 2 * slack + 1) {
		near_elsewhere(&f->key, e, expires);
		e->expires = expires;
		if (e->role != CT_DIRECT && ct_repair(&f->key, e, f->now)) {
			ct_forget(f);
			return;
		}
	}
	if (e->opening && !f->reply && ct_proves(p))
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
	if (!f.e)
		return FLOW_NONE;
	return f.e->opening ? FLOW_OPENING : FLOW_KNOWN;
}

/**
 * ct_supplanted - whether the place of a flow's other half is another flow's by now
 *
 * A half that lies near leaves its room to others, soon after both ends have closed. What is left of
 * the flow must not lead its late packets into the next one. And of two flows that began on one tuple at
 * the same moment, on two CPUs, only one has it.
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

/**
 * ct_recall - let a connection that has expired go on, of which a packet has come
 *
 * In its own direction: of a new flow, policy would be asked about who happens to speak first. What policy had cut is cut.
 */
slow_fn int ct_recall(struct flow *f)
{
	struct near_flow *n = near_of(&f->key);
	struct ct_entry *e = n ? &n->e : bpf_map_lookup_elem(&mst_ct_v1, &f->key);
	__u32 expired = e ? e->expires : f->now, lives;

	if (!e || e->role != CT_DIRECT || (__s32)(expired - f->now) >= 0 || ct_taken(expired, f->now))
		return 0;
	lives = f->now + ct_lifetime(e, f->key.proto, !e->opening);
	near_elsewhere(&f->key, e, lives);
	if (__sync_val_compare_and_swap(&e->expires, expired, lives) == expired)
		ct_find_key(f);
	return 0;
}

/* Find a packet's flow, but what is left of one that has closed, or never had its other half. */
inline_fn void ct_find_whole(struct flow *f, const struct pkt *p, __u8 scope)
{
	bool begins;

	ct_find(f, p, scope);
	if (!f->e || f->e->role == CT_DIRECT)
		return;
	begins = f->e->opening && !f->reply && !f->e->seen_reply;
	if ((begins || ct_closed(f->e)) && ct_supplanted(&f->key, f->e, f->now))
		ct_forget(f);
}

/* A SYN begins a new connection when the old one on its ports has closed (RFC 9293 3.6.1), an INIT a
 * new association; also when policy has cut the old one, which closes unheard: the opener's if it was answered, the other
 * end's in any case. Where the old one only has this tuple by translation, one end may still be sending. */
inline_fn bool ct_reopens(const struct flow *f, const struct pkt *p)
{
	if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	if (f->e->role == CT_POST_NAT && !f->reply)
		return ct_closed(f->e);
	return f->e->closing_orig | f->e->closing_reply ||
	       ((f->reply || f->e->seen_reply) && f->e->opener.endpoint == CT_END_CUT);
}

/* A SYN to a backend that is gone must not wait for the half-open entry to expire. The client's
 * half tells: a SYN on the other one's tuple is of another flow. */
slow_fn bool backend_gone(const struct ct_entry *e)
{
	return e->role == CT_PRE_NAT && e->backend && !grown_find(&mst_backends_v1_now, &e->backend);
}

/* Whether an echo is asked for by who is asked: in the flow it looks like an answer, and is none. */
inline_fn bool asks_back(const struct flow *f, const struct pkt *p)
{
	return f->reply && ((p->proto == IPPROTO_ICMP && p->icmp_type == ICMP_ECHO) ||
			    (p->proto == IPPROTO_ICMPV6 && p->icmp_type == ICMPV6_ECHO_REQUEST));
}

inline_fn bool begins_anew(const struct flow *f, const struct pkt *p)
{
	if (asks_back(f, p))
		return true;
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

/* Whether a flow wears the node's address for a pod that is gone, which cannot close it any more. */
inline_fn bool ct_orphaned(const struct ct_entry *e)
{
	struct endpoint *ep = e->flags & CT_MASQUERADE && e->role == CT_POST_NAT ? endpoint_slot(e->opener.endpoint) : NULL;

	return ep && (!ep->generation || !(addr_equal(&e->other.src, &ep->ip4) || addr_equal(&e->other.src, &ep->ip6)));
}

/* The last tries for a port are for those of half-open flows: a flood of such takes from its own kind. */
inline_fn bool half_open_yields(int try)
{
	return try >= NAT_PORT_TRIES * 3 / 4;
}

/* Whether the other end may still hold a closed flow's tuple (TIME-WAIT), and take no SYN there from somebody else, who has
 * other sequence numbers. One that was reset does for a moment of silence: anybody may send a RST, and the ends go on. */
slow_fn bool ct_lingers(const struct flow *f, const struct addr *opener)
{
	const struct ct_entry *e = f->e;

	if (!opener || e->role != CT_POST_NAT || addr_equal(&e->other.src, opener))
		return false;
	return !((e->closing_orig | e->closing_reply) & CT_RST) ||
	       ct_just_closed(e, e->expires, f->key.proto, f->now);
}

/**
 * tuple_taken - whether a flow occupies the tuple that the other end would see
 * @opener: whose new flow it is for, as long as a closed one of somebody else's is to keep it, too; or NULL
 * @yields: a half-open one does not, for there is hardly another tuple
 *
 * One that does not any more ends, both halves: its late packets must not be taken for the new one's.
 */
global_fn int tuple_taken(const struct tuple *t, __u8 proto, __u32 now, const struct addr *opener, bool yields)
{
	struct flow f = { .now = now };

	if (!t)
		return true;
	f.src_is_hi = ct_key_of(&f.key, t, proto, CT_SCOPE_FLOW);
	ct_find_by_key(&f);
	if (f.e && (ct_closed(f.e) ? ct_lingers(&f, opener) : !ct_orphaned(f.e) && !(yields && f.e->opening)))
		return true;
	ct_forget(&f);
	return false;
}
