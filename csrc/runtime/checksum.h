// The format of bytes that one rank hands to another outside of shared memory: a word that names the content and the
// version of the writer, a checksum, and the text. Truncated bytes, changed bytes and other versions are refused.
#pragma once

#include <cstdint>
#include <string>

namespace ringcomm {

// FNV-1a, 64 bits; `hash` is the hash of the bytes before the text.
std::uint64_t fingerprint(const std::string& text, std::uint64_t hash = 0xcbf29ce484222325u);

// "<word> <checksum> <text>"
std::string add_checksum(const std::string& word, const std::string& text);

// Returns the text; throws on rank `rank` of an engine unless `bytes` are the result of `add_checksum` with `word`.
std::string strip_checksum(const std::string& word, const std::string& bytes, const char* engine, int rank);

// Returns the first bytes in quotes, for a message; unprintable bytes as \x...
std::string quoted(const std::string& bytes);

}  // namespace ringcomm
