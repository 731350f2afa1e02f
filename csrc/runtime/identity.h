// Identifies machines and processes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

namespace ringcomm {

std::uint64_t random_number();

// The same for all threads of this process, different in every other process, also after a fork.
std::uint64_t process_number();

// Equal for processes that run on one kernel and are in the same namespaces of these kinds, such as "pid".
std::string machine_identity(std::initializer_list<const char*> namespaces);

}  // namespace ringcomm
