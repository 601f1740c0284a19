// The keywords If, Else, While, For, Where and End, which are macros. Include this header after
// the headers of other libraries, because the macros have common names.
#ifndef QPU_MACROS_H
#define QPU_MACROS_H

#include "qpu/statement.h"

// Each keyword except End opens a C++ scope, and End closes this scope. The variables that are
// declared in the scope are destroyed when the scope ends. The code from the keyword to End is a
// single C++ statement.
#define If(...)            \
  {                        \
    ::qpu::If_(__VA_ARGS__); \
    {
#define Else       \
  }                \
  ::qpu::Else_();  \
  {
#define While(...)            \
  {                           \
    ::qpu::While_(__VA_ARGS__); \
    {
#define For(init, condition, step) \
  {                                \
    init;                          \
    ::qpu::For_(condition);        \
    step;                          \
    ::qpu::ForBody_();             \
    {
#define Where(...)            \
  {                           \
    ::qpu::Where_(__VA_ARGS__); \
    {
#define End       \
  }               \
  ::qpu::End_();  \
  }

#endif
