// CRC-32C (Castagnoli's polynomial, as in iSCSI and ext4), for which processors have an instruction.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// `by_instruction` false: by tables, as on processors without it; for tests.
std::uint32_t crc32c(const void* data, std::size_t nbytes, bool by_instruction = true);

}  // namespace ringcomm
