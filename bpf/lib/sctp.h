/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * SCTP's checksum (RFC 9260 6.8, appendix A): CRC32c over the packet alone, so
 * that other addresses leave it as it is. Where bits of a packet change, so does
 * it, by what depends on those bits and on how many bytes lie from them to the
 * end of the packet, but not on what these are: a CRC is linear. One that was
 * wrong stays wrong.
 *
 * A polynomial's lowest power is the highest bit, the first byte of a packet has
 * the highest powers, and the checksum lies in the packet least byte first: read
 * as the programs read words, all three are of one kind.
 */
#pragma once

#include "common.h"

#define CRC32C_POLYNOMIAL 0x82f63b78
#define CRC32C_16_ZEROS 0x42709aea /* the checksum of as many bytes, all of them zero */

/* x^(8 * 2^k): what 2^k bytes that follow multiply by. */
static const __u32 crc32c_following[16] = {
	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a,
	0xb82be955, 0xb8fdb1e7, 0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a,
	0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

/* Return: the product of two polynomials. */
global_fn __u32 crc32c_times(__u32 a, __u32 b)
{
	__u32 product = 0;

	for (int i = 0; i < 32; i++) {
		product ^= a & -(b >> 31);
		b <<= 1;
		a = a >> 1 ^ (CRC32C_POLYNOMIAL & -(a & 1));
	}
	return product;
}

/**
 * crc32c_change - what bits of a packet change its checksum by
 * @bits: those that change, of 4 bytes, as they lie
 * @length: bytes from those 4 on to the end of the packet, with them; less than 64 KiB
 */
inline_fn __u32 crc32c_change(__u32 bits, __u32 length)
{
	for (int k = 0; k < 16; k++)
		if (length & 1u << k)
			bits = crc32c_times(bits, crc32c_following[k]);
	return bits;
}
