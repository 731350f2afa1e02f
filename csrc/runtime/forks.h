// Detects whether this process was forked after an object was made.
#pragma once

namespace ringcomm {

// Returns the number of forks between the process of the first call and this one.
int forks_so_far();

}  // namespace ringcomm
