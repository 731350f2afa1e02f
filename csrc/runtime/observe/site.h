// The place in the user's code that a call comes from, and the training step: for errors and records only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// Returns the place of the call in the current thread, such as "train.py:88"; the text is never freed.
using SiteSource = const char* (*)();
// Set by the binding to the user's language.
void set_site_source(SiteSource source);
// Never null; empty where the place is unknown.
const char* site_here();

// Copies as much of a text as fits, in whole characters. It keeps the end, which is the more useful part of a path.
void copy_end(char* to, std::size_t nbytes, const char* text);

// The step that this process is in; below 0: no step was set.
void set_step(std::int64_t step);
std::int64_t step_now();

}  // namespace ringcomm
