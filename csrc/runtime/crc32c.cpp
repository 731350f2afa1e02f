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

constexpr std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) {
  return (crc >> 8) ^ kTables[0][(crc ^ byte) & 255];
}

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
// The instruction takes three cycles, and one can start in each cycle: three runs of this length are added side by
// side.
constexpr std::size_t kRunWords = 512;
static_assert((kRunWords & (kRunWords - 1)) == 0, "make_run_tables doubles the length of a run");

// Table k has the remainder of each value of byte k of a remainder that is followed by a run of zeros.
constexpr std::array<std::array<std::uint32_t, 256>, 4> make_run_tables() {
  std::array<std::uint32_t, 32> bits{};  // the remainder of each bit, followed by n zero bytes; first n = 1
  for (int bit = 0; bit < 32; ++bit) bits[bit] = add_byte(1u << bit, 0);
  for (std::size_t n = 1; n < kRunWords * kBytes; n *= 2) {
    std::array<std::uint32_t, 32> twice{};
    for (int bit = 0; bit < 32; ++bit)
      for (int other = 0; other < 32; ++other) twice[bit] ^= bits[bit] >> other & 1 ? bits[other] : 0;
    bits = twice;
  }
  std::array<std::array<std::uint32_t, 256>, 4> tables{};
  for (int bit = 0; bit < 32; ++bit)
    for (std::uint32_t byte = 0; byte < 256; ++byte) tables[bit / 8][byte] ^= byte >> bit % 8 & 1 ? bits[bit] : 0;
  return tables;
}

constexpr auto kRunTables = make_run_tables();

std::uint32_t add_run_of_zeros(std::uint64_t crc) {
  std::uint32_t found = 0;
  for (std::size_t k = 0; k < kRunTables.size(); ++k) found ^= kRunTables[k][(crc >> (8 * k)) & 255];
  return found;
}

__attribute__((target("sse4.2"))) std::uint32_t add_words_by_instruction(std::uint32_t crc, const unsigned char* at,
                                                                         std::size_t words) {
  constexpr std::size_t kRun = kRunWords * kBytes;
  std::uint64_t first = crc;
  for (; words >= 3 * kRunWords; words -= 3 * kRunWords, at += 2 * kRun) {
    std::uint64_t second = 0, third = 0;
    for (const unsigned char* const end = at + kRun; at != end; at += kBytes) {
      first = __builtin_ia32_crc32di(first, word_at(at));
      second = __builtin_ia32_crc32di(second, word_at(at + kRun));
      third = __builtin_ia32_crc32di(third, word_at(at + 2 * kRun));
    }
    first = add_run_of_zeros(add_run_of_zeros(first) ^ second) ^ third;
  }
  for (; words > 0; --words, at += kBytes) first = __builtin_ia32_crc32di(first, word_at(at));
  return static_cast<std::uint32_t>(first);
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t before, bool by_instruction) {
  const auto* at = static_cast<const unsigned char*>(data);
  const std::size_t words = nbytes / kBytes;
  std::uint32_t crc = ~before;
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
