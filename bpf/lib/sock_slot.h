/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a socket was told at connect(), and an unconnected UDP socket of the first
 * Service that it asked, by its cookie: a number that no other socket ever has.
 * It is the socket's until close(), whose program frees it. A slot that nobody
 * freed (the program was not there yet) stays taken, and the sockets whose turn
 * it would be have theirs stored with the socket; so have sockets of the kernel's
 * own, for which that program does not run.
 */
#pragma once

#include "common.h"
#include "kernel.h"

/* The kernel's context of a program at a socket's address. */
struct bpf_sock_addr_kern {
	struct sock *sk;
} __attribute__((preserve_access_index));

/* Whether the kernel itself opened the socket: a subflow of MPTCP, SMC, a file system. */
inline_fn bool sock_of_kernel(struct bpf_sock_addr *ctx)
{
	struct bpf_sock_addr_kern *kernel = (void *)ctx;
	struct sock *sk = BPF_CORE_READ(kernel, sk);

	return !sk || BPF_CORE_READ_BITFIELD_PROBED(sk, sk_kern_sock);
}

/* The slot of a socket; NULL where its protocol has none. */
inline_fn struct sock_slot *sock_slot_at(__u32 proto, __u64 cookie)
{
	__u32 key = cookie & (SOCK_SLOTS - 1);

	if (!cookie || (proto != IPPROTO_TCP && proto != IPPROTO_UDP))
		return NULL;
	return proto == IPPROTO_UDP ? bpf_map_lookup_elem(&mst_udp_slots_v1, &key) : bpf_map_lookup_elem(&mst_sock_slots_v1, &key);
}

/* Return: what the socket with this cookie was told, or NULL. */
inline_fn struct sock_peer *sock_slot_peer(__u32 proto, __u64 cookie)
{
	struct sock_slot *s = sock_slot_at(proto, cookie);

	return s && s->cookie == cookie ? &s->peer : NULL;
}

inline_fn void sock_slot_free(__u32 proto, __u64 cookie)
{
	struct sock_slot *s = sock_slot_at(proto, cookie);

	if (s && s->cookie == cookie)
		s->cookie = 0;
}

/* Return: false when another socket has the slot, or this one is to have none. */
inline_fn bool sock_slot_take(struct bpf_sock_addr *ctx, const struct sock_peer *peer)
{
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct sock_slot *s = sock_slot_at(ctx->protocol, cookie);

	if (!s)
		return false;
	if (s->cookie == cookie)
		s->cookie = SOCK_SLOT_TAKEN;
	else if (s->cookie || sock_of_kernel(ctx) || __sync_val_compare_and_swap(&s->cookie, 0, SOCK_SLOT_TAKEN))
		return false;
	barrier();
	s->netns_cookie = bpf_get_netns_cookie(ctx);
	s->peer = *peer;
	barrier();
	s->cookie = cookie;
	return true;
}
