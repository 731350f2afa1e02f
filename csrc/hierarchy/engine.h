// The engine over several hosts.
#pragma once

#include "hierarchy/options.h"
#include "hierarchy/transport.h"

namespace ringcomm {

using HostsOfRanks = std::vector<std::vector<int>>;

// `hosts`: the ranks of each host; `local`: this rank's engine among those of its host, not connected yet; `transport`:
// connects all ranks. The kind of the result is that of `local`, so that callers need not distinguish them.
std::unique_ptr<Engine> make_hierarchical_engine(int rank, const HostsOfRanks& hosts, std::shared_ptr<Engine> local,
                                                 std::shared_ptr<Transport> transport,
                                                 const hierarchy::Options& options);

}  // namespace ringcomm
