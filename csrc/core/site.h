// Where in the user's code a call comes from, and in which step of its training: for errors and records alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// Tells the place in the caller's own thread, such as "train.py:88"; the text lives as long as the process.
using SiteSource = const char* (*)();
// Set by the floor that knows the user's language.
void set_site_source(SiteSource source);
// Never null; empty where nobody knows.
const char* site_here();

// Copies a text as far as it fits, in whole characters: its end, which says more of a path than the beginning.
void copy_end(char* to, std::size_t nbytes, const char* text);

// The step that this process is in; below 0: none was named.
void set_step(std::int64_t step);
std::int64_t step_now();

}  // namespace ringcomm
