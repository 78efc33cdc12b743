/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The first Service that an unconnected UDP socket asked, by its cookie, so that
 * close() frees what is kept of both. A slot that another open socket has stays
 * its, and what the second one leaves gives way with time.
 */
#pragma once

#include "common.h"

inline_fn struct sock_asked *sock_asked_at(__u64 cookie)
{
	__u32 key = cookie & (SOCK_SLOTS - 1);

	return bpf_map_lookup_elem(&mst_sock_asked_v1, &key);
}

/**
 * sock_asked_note - a socket has a backend of its first Service
 * @key: of its choice
 */
slow_fn int sock_asked_note(const struct sock_flow_key *key, const struct sock_flow *there)
{
	struct sock_asked *s = sock_asked_at(key->cookie);

	if (!s)
		return 0;
	if (s->cookie == key->cookie && (s->frontend_port != key->port || !addr_equal(&s->frontend, &key->addr)))
		return 0;
	if (s->cookie != key->cookie && __sync_val_compare_and_swap(&s->cookie, 0, SOCK_SLOT_TAKEN))
		return 0;
	barrier();
	s->frontend = key->addr;
	s->frontend_port = key->port;
	s->backend = there->addr;
	s->backend_port = there->port;
	barrier();
	s->cookie = key->cookie;
	return 0;
}

/* The socket is closed. */
slow_fn int sock_asked_free(__u64 cookie)
{
	struct sock_flow_key key = { .cookie = cookie, .kind = SOCK_FLOW_THERE };
	struct sock_asked *s = sock_asked_at(cookie);

	if (!cookie || !s || s->cookie != cookie)
		return 0;
	key.addr = s->frontend;
	key.port = s->frontend_port;
	bpf_map_delete_elem(&mst_sock_flows_v1, &key);
	key.addr = s->backend;
	key.port = s->backend_port;
	key.kind = SOCK_FLOW_BACK;
	bpf_map_delete_elem(&mst_sock_flows_v1, &key);
	s->cookie = 0;
	return 0;
}
