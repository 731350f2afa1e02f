// What one rank hands another as bytes, outside of memory that they share: a word that says what it is and which
// version wrote it, a checksum, and the text. What was cut off, changed, or written by another version is refused as a
// whole.
#pragma once

#include <cstdint>
#include <string>

namespace ringcomm {

// FNV-1a, 64 bits; `hash`: of what comes before the text.
std::uint64_t fingerprint(const std::string& text, std::uint64_t hash = 0xcbf29ce484222325u);

// "<word> <checksum> <text>"
std::string seal(const std::string& word, const std::string& text);

// The text; throws on rank `rank` of an engine when `bytes` are not what `seal` made of `word` and a text.
std::string unseal(const std::string& word, const std::string& bytes, const char* engine, int rank);

// The first bytes for a message: in quotes, what cannot be printed as \x...
std::string quoted(const std::string& bytes);

}  // namespace ringcomm
