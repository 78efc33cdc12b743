// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Tells what crc32c_change gives for two words of the frame: bits, length. Packets of test runs are
 * no longer than a page.
 */
#include "../../../../bpf/lib/sctp.h"

SEC("tc")
int change(struct __sk_buff *skb)
{
	__u32 in[2];

	return bpf_skb_load_bytes(skb, ETH_HLEN, in, sizeof(in)) ? 0 : (int)crc32c_change(in[0], in[1]);
}

char __license[] SEC("license") = "Dual BSD/GPL";
