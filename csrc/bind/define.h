// The parts of `_C`, each in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "core/engine.h"

namespace ringcomm {

void define_simulate(pybind11::module_& m);
void define_trace(pybind11::module_& m);
void define_hosts(pybind11::module_& m);
void define_nccl(pybind11::module_& m);
void define_pool(pybind11::module_& m);
void define_record(pybind11::module_& m);
void define_training(pybind11::module_& m);

// An engine may still wait for its own threads when it goes, and they must not meet a held GIL.
std::shared_ptr<Engine> share_beside_python(std::unique_ptr<Engine> engine);

}  // namespace ringcomm
