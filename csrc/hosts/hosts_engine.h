// The engine over several hosts.
#pragma once

#include "core/wire.h"
#include "hosts/options.h"

namespace ringcomm {

using HostsOfRanks = std::vector<std::vector<int>>;

// `hosts`: the ranks of each host; `local`: this rank's engine among those of its host, not connected yet; `wire`: of
// all ranks. It is of the kind of `local`: what calls it need not know.
std::unique_ptr<Engine> make_hosts_engine(int rank, const HostsOfRanks& hosts, std::shared_ptr<Engine> local,
                                          std::shared_ptr<Wire> wire, const hosts::HostsOptions& options);

}  // namespace ringcomm
