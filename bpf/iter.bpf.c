// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Lists the sockets that connect() led to a backend, of every namespace at
 * once: those that have an entry in mst_sock_peers, and no others are looked
 * at. Run by whoever removes a backend; nothing is attached for good.
 */
#include "lib/common.h"
#include "lib/kernel.h"

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

/* The kernel's context of this iterator, whose layout is fixed. */
struct bpf_iter__bpf_sk_storage_map {
	__bpf_md_ptr(struct bpf_iter_meta *, meta);
	__bpf_md_ptr(struct bpf_map *, map);
	__bpf_md_ptr(struct sock *, sk);
	__bpf_md_ptr(struct sock_peer *, value);
};

/* Not inlined, so that its argument's type is in the object, for Go. */
slow_fn int sock_addresses(struct sock_seen *seen, struct sock *sk)
{
	if (seen->family == AF_INET) {
		addr_from_ipv4(&seen->local, BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr));
		addr_from_ipv4(&seen->remote, BPF_CORE_READ(sk, __sk_common.skc_daddr));
		return 0;
	}
	bpf_core_read(&seen->local, sizeof(seen->local), &sk->__sk_common.skc_v6_rcv_saddr);
	bpf_core_read(&seen->remote, sizeof(seen->remote), &sk->__sk_common.skc_v6_daddr);
	return 0;
}

SEC("iter/bpf_sk_storage_map")
int mst_sockets(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct sock_peer *peer = ctx->value;
	struct sock_seen seen = {};
	struct sock *sk = ctx->sk;
	__u8 state;

	if (!sk || !peer)
		return 0;
	seen.proto = BPF_CORE_READ(sk, sk_protocol);
	state = BPF_CORE_READ(sk, __sk_common.skc_state);
	if (seen.proto == IPPROTO_UDP ? state != BPF_TCP_ESTABLISHED : state == BPF_TCP_CLOSE)
		return 0; /* not connected any more */
	seen.family = BPF_CORE_READ(sk, __sk_common.skc_family);
	sock_addresses(&seen, sk);
	seen.local_port = bpf_htons(BPF_CORE_READ(sk, __sk_common.skc_num));
	seen.remote_port = BPF_CORE_READ(sk, __sk_common.skc_dport);
	seen.bound_if = BPF_CORE_READ(sk, __sk_common.skc_bound_dev_if);
	seen.netns_cookie = BPF_CORE_READ(sk, __sk_common.skc_net.net, net_cookie);
	seen.cookie = bpf_get_socket_cookie(sk);
	seen.peer = *peer;
	bpf_seq_write(ctx->meta->seq, &seen, sizeof(seen));
	return 0;
}

char __license[] SEC("license") = "Dual BSD/GPL";
