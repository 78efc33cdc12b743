/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The short way between two pods of this node, from the SYN on: the flow's entry
 * lies at a place that is arithmetic (near.h), and says all that a packet needs.
 * A SYN between two pods that have just been judged, to the same port, is
 * entered at once. Whatever is unusual, or has to be judged, takes the long way.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "deliver.h"
#include "drop.h"
#include "events.h"
#include "fast.h"
#include "nat.h"
#include "near.h"
#include "nobody.h"
#include "plan.h"

#define NEAR_SERVE (-101) /* no tc verdict: near_serve may know */

/* Whether two pods are connected alike: what one's program does with a packet to the other, the other's would. */
inline_fn bool alike(const struct endpoint *a, const struct endpoint *b)
{
	return a != b && !((a->flags ^ b->flags) & (EP_HOST_END | EP_IN_POD)) && (!in_pod || siblings(a, b));
}

/* Whether a packet has its endpoint's link address. */
inline_fn bool from_own_mac(struct __sk_buff *skb, const struct endpoint *self)
{
	struct ethhdr *eth = packet(skb);

	return (void *)(eth + 1) <= packet_end(skb) && mac_equal(eth->h_source, self->mac);
}

inline_fn struct pair *pair_slot(const struct tuple *t, __u32 opener)
{
	__u32 slot = (opener ^ t->dport ^ t->dport >> 8 ^ t->dst.bytes[15]) & (PAIR_SLOTS - 1);

	return bpf_map_lookup_elem(&mst_pairs_v1, &slot);
}

/**
 * pair_keep - a new flow was judged, and let be
 * @generation: nobody_generation(), from before
 */
slow_fn int pair_keep(const struct plan *plan, const struct pkt *p, __u32 generation)
{
	struct pair *pair = pair_slot(&plan->post, plan->opener.endpoint);

	if (!pair)
		return 0;
	pair->src = p->t.src;
	pair->dst = plan->post.dst;
	pair->dport = plan->post.dport;
	pair->direct = plan->role == CT_DIRECT;
	pair->opener = plan->opener.endpoint;
	pair->opener_generation = plan->opener.generation;
	pair->responder = plan->responder.endpoint;
	pair->responder_generation = plan->responder.generation;
	pair->generation = generation;
	pair->until = now_ticks() + PAIR_LIFETIME;
	return 0;
}

/* What was judged of a SYN's pair, if it holds. @t: as the responder sees it. */
inline_fn struct pair *pair_of(const struct tuple *t, const struct endpoint *self, __u32 id)
{
	struct pair *pair = pair_slot(t, id);

	if (pair && pair->opener == id && pair->dport == t->dport && addr_equal(&pair->dst, &t->dst) &&
	    addr_equal(&pair->src, &t->src) && pair->opener_generation == self->generation &&
	    pair->generation == nobody_generation() && (__s32)(pair->until - now_ticks()) >= 0)
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
	if (near_is(&place->flows[0], t, src_is_hi))
		return &place->flows[0];
	return near_is(&place->flows[1], t, src_is_hi) ? &place->flows[1] : NULL;
}

/* The room for a new flow of a tuple at its place; NULL: none, or its last flow does not leave it yet. */
inline_fn struct near_flow *near_room_for(struct near_place *place, const struct tuple *t, __u32 now)
{
	bool hi;
	struct near_flow *own = near_find(place, t, &hi);

	if (!own)
		return near_room(place, now);
	return near_leaves(own, own->e.expires, now) ? own : NULL;
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
	barrier();
}

/* From here on it is a flow like any other. */
inline_fn void near_live(struct near_flow *n, __u32 now, __u32 tables)
{
	n->e.expires = now + timeouts.tcp_half_open;
	near_renew(n, tables);
}

/**
 * near_serve - begin a flow of a Service between two pods that have just been judged
 *
 * A plain Service: what asks for more than any backend goes the long way.
 */
global_fn int near_serve(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	__u32 now = now_seconds(), tables = tables_generation();
	struct service_key key;
	__u32 id = skb->cb[CB_ENDPOINT], backend;
	struct near_place *here, *there;
	struct near_flow *pre, *post;
	struct endpoint *to;
	struct service *s;
	struct pair *pair;
	struct backend *b;
	struct tuple t;
	int reason;

	if (!p || !self || !(self->flags & EP_SERVICE_TC))
		return FAST_NO;
	t = p->t;
	key = (struct service_key){ .addr = p->t.dst, .port = p->t.dport, .proto = IPPROTO_TCP };
	s = service_at(&key, SCOPE_ANY);
	if (!s || s->flags || s->affinity || !s->backends)
		return FAST_NO;
	b = slot_backend(s, s->backends > 1 ? bpf_get_prandom_u32() % s->backends : 0, &backend);
	if (!b)
		return FAST_NO;
	t.dst = b->addr;
	t.dport = b->port;
	pair = pair_of(&t, self, id);
	to = pair ? endpoint_slot(pair->responder) : NULL;
	here = near_place_of(&p->t);
	there = near_place_of(&t);
	if (!to || to->generation != pair->responder_generation || !here || !there || here == there ||
	    near_known_elsewhere(here, &p->t, now) || near_lives_elsewhere(&t, now))
		return FAST_NO;
	pre = near_room_for(here, &p->t, now);
	post = near_room_for(there, &t, now);
	if (!pre || !post || !near_take(post, now))
		return FAST_NO;
	if (!near_take(pre, now)) {
		post->e.expires = now - 1;
		return FAST_NO;
	}
	near_begin(post, &t, pair, CT_POST_NAT, backend);
	post->e.other = p->t;
	near_begin(pre, &p->t, pair, CT_PRE_NAT, backend);
	pre->e.other = t;
	barrier();
	near_live(post, now, tables);
	near_live(pre, now, tables);
	count_from_pod(id, skb->len);
	id = pair->responder;
	reason = translate(skb, p, &t);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	return deliver(skb, p, self, to, id, NULL);
}

/**
 * near_open - begin a flow between two pods that have just been judged, the other one maybe of another node
 * @p: a SYN, as glance leaves it
 * @self: whose hook this is
 *
 * Return: a tc verdict, FAST_NO, or NEAR_SERVE.
 */
global_fn int near_open(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	__u32 id = skb->cb[CB_ENDPOINT], now = now_seconds(), tables = tables_generation();
	struct pair *pair;
	struct near_place *place;
	struct near_flow *n;
	struct endpoint *to;
	bool hi;

	if (!p || !self || !from_own_mac(skb, self) || observed(now) || shadows_exist())
		return FAST_NO;
	pair = pair_of(&p->t, self, id);
	if (!pair || !pair->direct)
		return NEAR_SERVE;
	to = endpoint_slot(pair->responder);
	place = near_place_of(&p->t);
	if (!to || !place || (pair->responder ? to->generation != pair->responder_generation :
					       !remote_of(pair->responder_generation)) ||
	    near_known_elsewhere(place, &p->t, now))
		return FAST_NO;
	n = near_find(place, &p->t, &hi);
	if (n && ct_alive(&n->e, now)) {
		if (n->e.role != CT_DIRECT || !(n->e.closing_orig | n->e.closing_reply))
			return FAST_NO;
		n->e.expires = now - 1; /* its last flow has closed */
	}
	if (!n)
		n = near_room(place, now);
	if (!n || !near_take(n, now))
		return FAST_NO;
	near_begin(n, &p->t, pair, CT_DIRECT, BACKEND_NONE);
	near_live(n, now, tables);
	if (!pair->responder) /* to another node it takes the way of a known flow's packet */
		return FAST_NO;
	count_from_pod(id, skb->len);
	return deliver(skb, p, self, to, pair->responder, NULL);
}

/* The tuple's flow has just been entered. */
inline_fn void near_keep(const struct tuple *t, __u32 tables)
{
	struct near_place *place = near_place_of(t);
	bool hi;
	struct near_flow *n = place ? near_find(place, t, &hi) : NULL;

	if (n)
		near_renew(n, tables);
}

/* A new flow's halves: of one without translation both are one. */
slow_fn int near_new(struct pkt *p, const struct tuple *post)
{
	near_keep(&p->t, p->tables);
	if (!tuple_equal(&p->t, post))
		near_keep(post, p->tables);
	return 0;
}

/* A known flow was judged, on its way from @self to @to. */
inline_fn void near_known(const struct pkt *p, const struct ct_key *at, const struct endpoint *self,
			  const struct endpoint *to)
{
	struct near_flow *n = near_of(at);

	if (n && alike(self, to))
		near_renew(n, p->tables);
}

/* The other half of a Service's flow, if it lies near. */
slow_fn struct near_flow *near_half(const struct near_flow *n)
{
	const struct tuple *t = &n->e.other;
	struct near_place *place = near_place_of(t);
	struct tuple mine = {};
	bool hi;
	struct near_flow *half = place ? near_find(place, t, &hi) : NULL;

	ct_tuple(&mine, &n->key, &n->e);
	return half && ct_is_half(&half->e, &n->e, &mine) ? half : NULL;
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
	if (!closed && ct_closed(&n->e) && observed(now))
		event_closed(&n->key, &n->e, IPPROTO_TCP, p->tcp_flags, now);
	return 0;
}

/* The flow learns of a packet that answers, proves or closes it, both halves at once. Return: false when one lies
 * elsewhere. */
inline_fn bool near_learn(struct near_flow *n, struct pkt *p, bool reply)
{
	struct near_flow *half = NULL;

	if (n->e.role != CT_DIRECT) {
		half = near_half(n);
		if (!half)
			return false;
	}
	if (reply && !n->e.seen_reply) {
		n->e.seen_reply = 1;
		if (half)
			half->e.seen_reply = 1;
		else /* lives by its answer, as any without translation that lies where it will stay (ct_lasts) */
			n->e.expires = now_seconds() + ct_lifetime(&n->e, IPPROTO_TCP, true);
	} else if (!reply && n->e.opening && (n->e.seen_reply || (half && half->e.seen_reply))) {
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
 * near_path - let a packet go the way of its flow, which lies near
 * @p: as glance leaves it
 * @self: whose hook this is: from_pod's
 *
 * Return: a tc verdict or FAST_NO.
 */
global_fn int near_path(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	const struct ct_end *mine, *other;
	struct near_place *place;
	struct near_flow *n;
	struct endpoint *to;
	struct ct_entry *e;
	bool reply;
	int reason;

	if (!p || !self)
		return FAST_NO;
	place = near_place_of(&p->t);
	n = place ? near_find(place, &p->t, &reply) : NULL;
	if (!n)
		return FAST_NO;
	e = &n->e;
	reply ^= e->flags & CT_ORIGIN_IS_HI;
	mine = reply ? &e->responder : &e->opener;
	other = reply ? &e->opener : &e->responder;
	if ((__s32)(n->until - now_ticks()) < 0 || n->tables != tables_generation() ||
	    mine->endpoint != skb->cb[CB_ENDPOINT] || mine->generation != self->generation || !other->endpoint)
		return FAST_NO;
	to = endpoint_slot(other->endpoint);
	if (!to || to->generation != other->generation || !from_own_mac(skb, self))
		return FAST_NO;
	if (e->role != CT_DIRECT && reply != (e->role == CT_POST_NAT))
		return FAST_NO;
	if (p->shape != SHAPE_USUAL || (reply ? !e->seen_reply : e->opening) || (e->role != CT_DIRECT && ct_closed(e))) {
		if (p->tcp_flags & TCP_SYN && (!reply || p->shape != SHAPE_OPENS))
			return FAST_NO;
		if (!near_learn(n, p, reply))
			return FAST_NO;
	}
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (e->role != CT_DIRECT) {
		struct tuple t = e->other;

		if (reply)
			tuple_reverse(&t, &e->other);
		reason = translate(skb, p, &t);
		if (reason)
			return drop(skb, reason, DIR_FROM_POD);
	}
	return deliver(skb, p, self, to, other->endpoint, NULL);
}

/* The same of any packet. */
inline_fn int near_way(struct __sk_buff *skb, struct pkt *p, struct endpoint *self)
{
	int verdict;

	if (dry_run || p->proto != IPPROTO_TCP || !p->shape)
		return FAST_NO;
	if ((p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return near_path(skb, p, self);
	if (p->shape != SHAPE_OPENS)
		return FAST_NO;
	verdict = near_open(skb, p, self);
	return verdict == NEAR_SERVE ? near_serve(skb, p, self) : verdict;
}
