// Whether this process is another one than that which made an object.
#pragma once

namespace ringcomm {

// Counts the forks between the first caller's process and this one.
int forks_so_far();

}  // namespace ringcomm
