// Any engine, with its calls written into a journal.
#pragma once

#include <memory>

#include "core/engine.h"

namespace ringcomm {

// Without a journal where RINGCOMM_RECORD is 0. A wait for a request keeps the engine alive.
std::unique_ptr<Engine> record(std::unique_ptr<Engine> engine);
// The engine that a recorded one writes about, to be a part of another one that is recorded; else itself.
std::shared_ptr<Engine> unrecorded(const std::shared_ptr<Engine>& engine);

}  // namespace ringcomm
