/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a TCP socket was told at connect(), by its cookie: a number that no other
 * socket ever has. It is the socket's until close(), whose program frees it. A
 * slot that nobody freed (the program was not there yet) stays taken, and the
 * sockets whose turn it would be have theirs stored with the socket.
 */
#pragma once

#include "common.h"

inline_fn struct sock_slot *sock_slot_at(__u64 cookie)
{
	__u32 key = cookie & (SOCK_SLOTS - 1);

	return bpf_map_lookup_elem(&mst_sock_slots_v1, &key);
}

/* Return: what the socket with this cookie was told, or NULL. */
inline_fn struct sock_peer *sock_slot_peer(__u64 cookie)
{
	struct sock_slot *s = cookie ? sock_slot_at(cookie) : NULL;

	return s && s->cookie == cookie ? &s->peer : NULL;
}

inline_fn void sock_slot_free(__u64 cookie)
{
	struct sock_slot *s = cookie ? sock_slot_at(cookie) : NULL;

	if (s && s->cookie == cookie)
		s->cookie = 0;
}

/* Return: false when another socket has the slot. */
inline_fn bool sock_slot_take(__u64 cookie, __u64 netns_cookie, const struct sock_peer *peer)
{
	struct sock_slot *s = cookie ? sock_slot_at(cookie) : NULL;

	if (!s)
		return false;
	if (s->cookie == cookie)
		s->cookie = SOCK_SLOT_TAKEN;
	else if (__sync_val_compare_and_swap(&s->cookie, 0, SOCK_SLOT_TAKEN))
		return false;
	barrier();
	s->netns_cookie = netns_cookie;
	s->peer = *peer;
	barrier();
	s->cookie = cookie;
	return true;
}
