#include "runtime/checksum.h"

#include <cstdint>
#include <cstdio>

#include "core/error.h"

namespace ringcomm {

namespace {

constexpr std::size_t kQuoted = 40;

std::string checksum(const std::string& text) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fingerprint(text)));
  return digits;
}

}  // namespace

std::uint64_t fingerprint(const std::string& text, std::uint64_t hash) {
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::string add_checksum(const std::string& word, const std::string& text) {
  return concat(word, ' ', checksum(text), ' ', text);
}

std::string strip_checksum(const std::string& word, const std::string& bytes, const char* engine, int rank) {
  const std::size_t head = word.size() + 18;
  if (bytes.size() >= head) {
    std::string text = bytes.substr(head);
    if (bytes == add_checksum(word, text)) return text;
  }
  fail(ErrorCode::kInvalid, "connect: rank ", rank, " expected handles of this version of the ", engine,
       " engine, got ", quoted(bytes), " (", bytes.size(),
       " bytes); install one version of ringcomm everywhere, pass handles as they are");
}

std::string quoted(const std::string& bytes) {
  std::string text = "\"";
  for (const unsigned char byte : bytes.substr(0, kQuoted)) {
    char code[5];
    std::snprintf(code, sizeof code, "\\x%02x", byte);
    const bool plain = byte >= ' ' && byte <= '~' && byte != '"' && byte != '\\';
    text += plain ? std::string(1, static_cast<char>(byte)) : code;
  }
  return text + '"';
}

}  // namespace ringcomm
