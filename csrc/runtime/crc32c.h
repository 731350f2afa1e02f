// CRC-32C (Castagnoli's polynomial, as in iSCSI and ext4), for which processors have an instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// `before` is the checksum of the bytes that precede the data, so that a file can be summed in parts.
// `by_instruction` false: by tables, as on processors without it; for tests.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t before = 0, bool by_instruction = true);

}  // namespace ringcomm
