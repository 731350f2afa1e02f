#include "runtime/crc32c.h"

#include <array>
#include <cstring>

namespace ringcomm {

namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // bits in reverse
constexpr std::size_t kBytes = 8;                  // per step

using Tables = std::array<std::array<std::uint32_t, 256>, kBytes>;

// Table k has the remainder of each byte that is followed by k zero bytes.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ (remainder & 1 ? kPolynomial : 0);
    tables[0][byte] = remainder;
  }
  for (std::size_t k = 1; k < kBytes; ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) { return (crc >> 8) ^ kTables[0][(crc ^ byte) & 255]; }

std::uint64_t word_at(const unsigned char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, kBytes);
  return word;
}

std::uint32_t add_words(std::uint32_t crc, const unsigned char* at, std::size_t words) {
  for (; words > 0; --words, at += kBytes) {
    const std::uint64_t word = word_at(at) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < kBytes; ++k) crc ^= kTables[kBytes - 1 - k][(word >> (8 * k)) & 255];
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t add_words_by_instruction(std::uint32_t crc, const unsigned char* at,
                                                                         std::size_t words) {
  std::uint64_t wide = crc;
  for (; words > 0; --words, at += kBytes) wide = __builtin_ia32_crc32di(wide, word_at(at));
  return static_cast<std::uint32_t>(wide);
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, bool by_instruction) {
  const auto* at = static_cast<const unsigned char*>(data);
  const std::size_t words = nbytes / kBytes;
  std::uint32_t crc = ~0u;
#if defined(__x86_64__)
  crc = by_instruction && __builtin_cpu_supports("sse4.2") ? add_words_by_instruction(crc, at, words)
                                                           : add_words(crc, at, words);
#else
  (void)by_instruction;
  crc = add_words(crc, at, words);
#endif
  for (at += words * kBytes; at != static_cast<const unsigned char*>(data) + nbytes; ++at) crc = add_byte(crc, *at);
  return ~crc;
}

}  // namespace ringcomm
