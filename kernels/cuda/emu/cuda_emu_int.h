// cuda_emu_int.h - between the emulated device (cuda_emu.cpp) and the emulated runtime (cuda_runtime.cpp).
#pragma once
#include "cuda_emu.h"

// Runs a grid to its end; false: the kernel failed, emu_last_error says why.
bool emu_run_grid(dim3 g, dim3 b, size_t smem, const std::function<void()> &fn);
extern char emu_last_error[512];
// Queues work on a stream as a kernel is: at once, later (EMU_LAZY), or into the graph that is being captured.
void emu_submit(cudaStream_t, std::function<void()>);
