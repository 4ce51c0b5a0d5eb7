// What the guided library calls in programs that no fuzzer drives.
extern "C" void __sanitizer_cov_trace_pc() {}
