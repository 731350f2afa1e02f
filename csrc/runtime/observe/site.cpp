#include "runtime/observe/site.h"

#include <atomic>
#include <cstring>

namespace ringcomm {

namespace {
std::atomic<SiteSource> source{nullptr};
std::atomic<std::int64_t> step{-1};
}  // namespace

void set_site_source(SiteSource tells) { source.store(tells); }

const char* site_here() {
  const SiteSource tells = source.load(std::memory_order_relaxed);
  return tells ? tells() : "";
}

void copy_end(char* to, std::size_t nbytes, const char* text) {
  const std::size_t length = std::strlen(text);
  const char* from = length < nbytes ? text : text + length - (nbytes - 1);
  while ((static_cast<unsigned char>(*from) & 0xc0) == 0x80) ++from;  // skips the rest of a split UTF-8 character
  std::strcpy(to, from);
}

void set_step(std::int64_t now) { step.store(now, std::memory_order_relaxed); }
std::int64_t step_now() { return step.load(std::memory_order_relaxed); }

}  // namespace ringcomm
