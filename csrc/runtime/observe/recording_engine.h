// Wraps any engine and records its calls in a flight recorder.
#pragma once

#include <memory>

#include "core/engine.h"

namespace ringcomm {

// Returns the recording engine; without a flight recorder where RINGCOMM_RECORD is 0. Waiting for a request keeps the
// engine alive.
std::unique_ptr<Engine> record(std::unique_ptr<Engine> engine);
// Unwraps a recording engine, which is to become a part of another one; returns any other engine as it is.
std::shared_ptr<Engine> unrecorded(const std::shared_ptr<Engine>& engine);

}  // namespace ringcomm
